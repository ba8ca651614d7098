"""bertjax: BERT pre-training and fine-tuning in JAX, from raw text."""

__version__ = '0.1.0'
