"""BERT-tiny (Turc et al. 2019): 2 layers of 128, for laptops and tests of one's own data.

  python -m bertjax.main --config=configs/tiny.py --workdir=runs/tiny --config.data.path=shards/

Source: sizes of "Well-Read Students Learn Better" (google-research/bert README, BERT-tiny); the
recipe is the paper's with a higher rate, which small models take. Expect about 30 sequences of 128
tokens a second and CPU core, and a masked-LM loss well under the unigram entropy of the text after
5,000 steps.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  """Two layers of 128."""
  config = common.get_config()
  config.model.hidden_size = 128
  config.model.num_hidden_layers = 2
  config.model.num_attention_heads = 2
  config.model.intermediate_size = 512
  config.model.dtype = 'float32'
  config.model.scan_unroll = 2
  config.phases = (common.phase(seq_length=128, batch_size=32, num_steps=20_000),)
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 1000
  return config
