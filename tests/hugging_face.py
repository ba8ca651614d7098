"""Parameters out of arrays under Hugging Face's names, for the golden tests."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.convert import names

_TABLE = {variable.ours: variable for variable in names.VARIABLES}


def fill(abstract, tensors: dict[str, np.ndarray], dtype=np.float32):
  """Parameters shaped like `abstract` from a state dict; vocabulary rows are zero-padded.

  Unlike bertjax.convert it takes anything by these names: float64, gradients, moments.
  """
  def one(path, leaf):
    variable = _TABLE[jax.tree_util.keystr(path, simple=True, separator='/')]
    transposed = names.HUGGING_FACE in variable.transposed
    arrays = [tensors[name].T if transposed else tensors[name]
              for name in variable.names(names.HUGGING_FACE, leaf.shape[0])]
    array = np.asarray(np.stack(arrays) if variable.stacked else arrays[0], dtype)
    pad = [(0, a - b) for a, b in zip(leaf.shape, array.shape, strict=True)]
    return jnp.asarray(np.pad(array, pad))

  return jax.tree_util.tree_map_with_path(one, abstract)
