"""bertjax: BERT pre-training in JAX, from raw text."""

__version__ = '0.1.0'
