"""A small BERT on the embedded default corpus, in minutes on two CPU cores.

  python -m bertjax.main --config=configs/quickstart.py --workdir=runs/quickstart

Source: the shape of BERT-tiny (Turc et al. 2019, 2 layers of 128) on the English of the Python
documentation and of the docstrings of this project's own dependencies, read where they are
installed.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
  """The configuration of the README's first command."""
  config = common.get_config()
  config.log_every = 100
  config.model.hidden_size = 128
  config.model.num_hidden_layers = 2
  config.model.num_attention_heads = 4
  config.model.intermediate_size = 512
  config.model.max_position_embeddings = 128
  # 0.02 suits a width of 768; with it, the attention of a narrow model begins almost uniform.
  config.model.initializer_range = 0.05
  config.model.hidden_dropout_prob = 0.0  # minutes of training do not overfit
  config.model.attention_probs_dropout_prob = 0.0
  config.model.dtype = 'float32'
  config.model.scan_unroll = 2
  config.data.input = 'builtin:docs'
  config.data.vocab_size = 8192
  config.data.heldout = 0.02
  # Many small steps: what holds a small model back at first is their number, not their noise.
  config.phases = (common.phase(seq_length=64, batch_size=16, num_steps=6000),)
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 100
  config.optimizer.b2 = 0.98
  config.checkpoint.every = 1000
  config.heldout.every = 1000
  config.heldout.max_examples = 1024
  return config
