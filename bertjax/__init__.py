"""bertjax: BERT pre-training and fine-tuning in JAX, from raw text."""

__version__ = '0.1.0'


def load(path, step: int | None = None):
  """A trained model with its tokenizer, from Python; see bertjax.api.load."""
  from bertjax import api  # it loads JAX, which commands that only read text need not wait for

  return api.load(path, step)
