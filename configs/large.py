r"""BERT-large with the paper's recipe: 900,000 steps at length 128, then 100,000 at 512.

  python -m bertjax.main --config=configs/large.py --workdir=gs://bucket/large \
    --config.data.path=shards/

Source: Devlin et al. 2018, appendix A.2, as configs/base.py; 24 layers of 1,024. Expect on
Wikipedia and Books a held-out masked-LM perplexity of about 3.2 (the paper's figure; not yet
reproduced here). The compute is 8.2e19 FLOP.

`--config=configs/large.py:fast` departs from the paper in one thing: it drops no attention weights
(attention_probs_dropout_prob 0; the other dropout stays 0.1). Only so can attention run in a fused
kernel (splash on a TPU, cuDNN on a GPU), which never writes the [T, T] scores to memory. What that
does to the quality has not been measured here.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(variant: str = '') -> ConfigDict:
  """Twenty-four layers of 1,024; `variant` is '' or 'fast'.

  Raises:
    ValueError: another variant.
  """
  if variant not in ('', 'fast'):
    raise ValueError(f"configs/large.py:{variant}: write ':fast' or nothing behind the file")
  config = base.get_config()
  config.model.hidden_size = 1024
  config.model.num_hidden_layers = 24
  config.model.num_attention_heads = 16
  config.model.intermediate_size = 4096
  config.model.remat = 'dots'
  if variant == 'fast':
    config.model.attention_probs_dropout_prob = 0.0
    config.model.remat = 'dense_attention'
  return config
