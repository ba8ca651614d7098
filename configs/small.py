"""BERT-small (Turc et al. 2019): 4 layers of 512, a day on one accelerator.

  python -m bertjax.main --config=configs/small.py --workdir=runs/small --config.data.path=shards/

Source: sizes of "Well-Read Students Learn Better" (google-research/bert README, BERT-small, whose
GLUE test average is 71.2 after the paper's full recipe on Wikipedia and Books).
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  """Four layers of 512."""
  config = common.get_config()
  config.model.hidden_size = 512
  config.model.num_hidden_layers = 4
  config.model.num_attention_heads = 8
  config.model.intermediate_size = 2048
  config.phases = (common.phase(seq_length=128, batch_size=256, num_steps=250_000),)
  config.optimizer.learning_rate = 5e-4
  return config
