"""Weights to begin with from another checkpoint: taken over in whole groups, never in part."""

import re

import jax
import numpy as np
from flax import traverse_util

from bertjax import checkpoint, state

# What may be absent from a checkpoint, or belong to another task; all else must be there whole.
_OPTIONAL = r'bert/pooler|masked_lm|next_sentence|classifier|qa_outputs|layer_weights'


def _group(path: str) -> str | None:
  match = re.match(rf'({_OPTIONAL})(/|$)', path)
  return match.group(1) if match else None


def complete(
    params: state.Params, shapes: state.Params, build, seed: int, drop: tuple[str, ...] = ()
) -> tuple[state.Params, tuple[str, ...], tuple[str, ...]]:
  """Fits the parameters of a checkpoint to a model.

  Args:
    params: of the checkpoint, a nested dict of numpy arrays.
    shapes: of the model.
    build: from nnx.Rngs to the model, for the groups that are new.
    seed: of the new groups.
    drop: groups of the checkpoint that are not to be used, e.g. the head of another task.

  Returns:
    The parameters; the groups that are new (a head, the pooler); those that were not used.

  Raises:
    CheckpointError: the encoder's parameters are not all there, or of other shapes.
  """
  have = {path: array for path, array in traverse_util.flatten_dict(params, sep='/').items()
          if _group(path) not in drop}
  want = traverse_util.flatten_dict(shapes, sep='/')
  given = {_group(path) for path in have}
  new = sorted({_group(path) for path in want if _group(path) and _group(path) not in given})
  taken = {path: leaf for path, leaf in want.items() if _group(path) not in new}
  wrong = [f'{path} is absent' for path in taken if path not in have]
  wrong += [f'{path} is {have[path].shape} and the model has {leaf.shape}'
            for path, leaf in taken.items() if path in have and have[path].shape != leaf.shape]
  wrong += [f'{path} is unknown to the model' for path in have
            if path not in want and not _group(path)]
  if wrong:
    more = f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''
    raise checkpoint.CheckpointError(
        f'the checkpoint does not fit the model: {"; ".join(wrong[:5])}{more}. Take the model\'s '
        'sizes from the checkpoint: leave them out of the configuration')
  filled = {path: np.asarray(have[path], leaf.dtype) for path, leaf in taken.items()}
  if new:
    # The whole model is made once; what is not new is thrown away.
    fresh = traverse_util.flatten_dict(jax.jit(lambda: state.init_params(build, seed))(), sep='/')
    filled |= {path: np.asarray(array) for path, array in fresh.items() if path not in filled}
  unused = sorted({_group(path) or path for path in have if path not in want} | (
      set(drop) & {_group(path) for path in traverse_util.flatten_dict(params, sep='/')}))
  return traverse_util.unflatten_dict(filled, sep='/'), tuple(new), tuple(unused)


def in_words(
    path: str, step: int, new: tuple[str, ...], unused: tuple[str, ...]
) -> str:
  """Where the weights are from, for the start-up block."""
  text = f'weights of {path} (step {step}), a new schedule'
  if new:
    text += f'; newly initialised: {", ".join(new)}'
  if unused:
    text += f'; not used: {", ".join(unused)}'
  return text
