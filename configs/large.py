r"""BERT-large with the paper's recipe: 900,000 steps at length 128, then 100,000 at 512.

  python -m bertjax.main --config=configs/large.py --workdir=gs://bucket/large \
    --config.data.path=shards/

Source: Devlin et al. 2018, appendix A.2, as configs/base.py; 24 layers of 1,024. Expect on
Wikipedia and Books a held-out masked-LM perplexity of about 3.2 (the paper's figure; not yet
reproduced here). The compute is 8.2e19 FLOP.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
  """Twenty-four layers of 1,024."""
  config = base.get_config()
  config.model.hidden_size = 1024
  config.model.num_hidden_layers = 24
  config.model.num_attention_heads = 16
  config.model.intermediate_size = 4096
  config.model.remat = 'dots'
  return config
