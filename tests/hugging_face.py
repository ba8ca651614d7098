"""Hugging Face parameter names to and from ours, for the golden tests (kernels there are [out,
in])."""

import re

import jax
import jax.numpy as jnp
import numpy as np

_LAYER = {
    'attention/query': 'attention.self.query',
    'attention/key': 'attention.self.key',
    'attention/value': 'attention.self.value',
    'attention/output': 'attention.output.dense',
    'attention/layer_norm': 'attention.output.LayerNorm',
    'intermediate': 'intermediate.dense',
    'output': 'output.dense',
    'output_layer_norm': 'output.LayerNorm',
}
_SINGLE = {
    'bert/embeddings/word_embeddings/embedding': 'bert.embeddings.word_embeddings.weight',
    'bert/embeddings/position_embeddings/embedding': 'bert.embeddings.position_embeddings.weight',
    'bert/embeddings/token_type_embeddings/embedding':
        'bert.embeddings.token_type_embeddings.weight',
    'bert/embeddings/layer_norm': 'bert.embeddings.LayerNorm',
    'bert/pooler': 'bert.pooler.dense',
    'masked_lm/dense': 'cls.predictions.transform.dense',
    'masked_lm/layer_norm': 'cls.predictions.transform.LayerNorm',
    'masked_lm/bias': 'cls.predictions.bias',
    'next_sentence': 'cls.seq_relationship',
    'classifier': 'classifier',
    'qa_outputs': 'qa_outputs',
}


def _tensor(tensors, name, leaf):
  if leaf == 'kernel':
    return tensors[f'{name}.weight'].T
  return tensors[f'{name}.{"weight" if leaf == "scale" else leaf}']


def lookup(tensors: dict[str, np.ndarray], path: str) -> np.ndarray:
  """The array of our parameter `path` out of a Hugging Face state dict, unpadded."""
  match = re.match(r'bert/encoder/layers/(.*)/(\w+)$', path)
  if match:
    layers = 1 + max(int(m.group(1)) for m in (re.match(r'bert\.encoder\.layer\.(\d+)', k)
                                               for k in tensors) if m)
    return np.stack([
        _tensor(tensors, f'bert.encoder.layer.{i}.{_LAYER[match.group(1)]}', match.group(2))
        for i in range(layers)])
  if path in _SINGLE:
    return tensors[_SINGLE[path]]
  parent, leaf = path.rsplit('/', 1)
  return _tensor(tensors, _SINGLE[parent], leaf)


def fill(abstract, tensors: dict[str, np.ndarray], dtype=np.float32):
  """Parameters shaped like `abstract` from a Hugging Face state dict; vocabulary rows
  zero-padded."""
  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    array = np.asarray(lookup(tensors, name), dtype)
    pad = [(0, a - b) for a, b in zip(leaf.shape, array.shape, strict=True)]
    return jnp.asarray(np.pad(array, pad))

  return jax.tree_util.tree_map_with_path(one, abstract)
