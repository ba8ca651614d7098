"""A trained model from Python: `api.load(checkpoint)`, then `fill_mask` and what else it can do.

A checkpoint carries its configuration and tokenizer, so a path is all that is needed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from bertjax import checkpoint, heads, state
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.model import BertConfig


class MaskError(ValueError):
  """A sentence that cannot be filled in; the message says the mend."""


class Guess(NamedTuple):
  """One candidate for a masked position."""

  token: str
  probability: float


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A pre-trained model with all that belongs to it.

  Attributes:
    config: sizes of the encoder.
    graphdef: the model without its parameters; `nnx.merge(graphdef, params)` is the model.
    params: a nested dict of float32 arrays.
    tokenizer: the one that it was trained with.
    metadata: what the checkpoint says of itself: step, position, config, data_hash, ...
  """

  config: BertConfig
  graphdef: nnx.GraphDef
  params: state.Params
  tokenizer: tokenizer_lib.Tokenizer
  metadata: dict[str, Any]

  def fill_mask(self, text: str, top: int = 5) -> list[list[Guess]]:
    """The likeliest tokens at each [MASK] of a sentence.

    Args:
      text: a sentence with the tokenizer's mask token in it, at least once.
      top: candidates for each mask.

    Raises:
      MaskError: no mask in the text, or more tokens than the position table holds.
    """
    tokenizer = self.tokenizer
    ids = tokenizer.encode(text, special_text=True).ids
    if tokenizer.mask_id not in ids:
      raise MaskError(f'no {tokenizer.token(tokenizer.mask_id)} in {text!r}; write it where a word '
                      'is to be guessed')
    ids = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    if len(ids) > self.config.max_position_embeddings:
      raise MaskError(f'{len(ids)} tokens, but the model takes '
                      f'{self.config.max_position_embeddings}; shorten the text')
    # Rows and predictions of few sizes, so that few programs are compiled.
    length = min(_round_up(len(ids), 32), self.config.max_position_embeddings)
    row = np.full((1, length), tokenizer.pad_id, np.int32)
    row[0, :len(ids)] = ids
    mask = (np.arange(length) < len(ids)).astype(np.int32)[None]
    masked = np.flatnonzero(row[0] == tokenizer.mask_id)
    positions = np.zeros((1, _round_up(len(masked), 8)), np.int32)
    positions[0, :len(masked)] = masked
    logits = self._masked_lm_logits(row, mask, positions)[:len(masked)]
    probabilities = np.asarray(jax.nn.softmax(logits))
    best = np.argsort(-probabilities, axis=-1)[:, :top]
    return [[Guess(tokenizer.token(i), float(row[i])) for i in ids]
            for row, ids in zip(probabilities, best, strict=True)]

  @functools.cached_property
  def _masked_lm_logits(self) -> Callable:
    def logits(params, input_ids, attention_mask, positions):
      model = nnx.merge(self.graphdef, params)
      return model(input_ids, jnp.zeros_like(input_ids), attention_mask, positions)[0]

    return functools.partial(jax.jit(logits), jax.device_put(self.params))


def load(path: epath.PathLike, step: int | None = None) -> Pretrained:
  """Loads a checkpoint of pre-training.

  Args:
    path: a workdir, its checkpoints folder, or one step's folder.
    step: which step; None is the newest complete one.

  Raises:
    CheckpointError: none there, none complete, or the step is absent or damaged.
  """
  metadata = checkpoint.read_metadata(path, step)
  config = BertConfig(**metadata['config']['model'])
  graphdef, shapes = state.split(lambda rngs: heads.BertForPreTraining(config, rngs))
  return Pretrained(
      config=config, graphdef=graphdef,
      params=checkpoint.restore_params(path, step, abstract=shapes),
      tokenizer=tokenizer_lib.load(checkpoint.tokenizer_folder(path, step)), metadata=metadata)


def _round_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple
