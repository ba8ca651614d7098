"""Feature-based use of a model: the hidden states of a frozen encoder (paper, section 5.3).

    texts ── encode ──> rows ── hidden_states ──> batches of vectors ── write ──> features.npz
"""

import functools
import tempfile
import zipfile
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import nnx
from jaxtyping import Float, Float32, Int, Int32

from bertjax import api, state
from bertjax.data import encoding, examples, text_file

POOLINGS = ('none', 'cls', 'mean')
# Rows are padded to a multiple of this, so that few programs are compiled.
_LENGTH_MULTIPLE = 32

Row = dict[str, Int32[np.ndarray, '_']]


class FeatureError(ValueError):
  """Texts or settings that cannot be used; the message names file and line and how to mend it."""


def read(path: epath.PathLike) -> list[tuple[str, str | None]]:
  """The texts of a file, one a line; a TAB separates the two parts of a pair.

  An empty line is an empty text, so that the numbers of texts and lines agree.

  Raises:
    FeatureError: no text, no lines, or a line with more than one TAB.
  """
  lines = text_file.read(path, FeatureError).split('\n')
  if not lines[-1]:
    lines.pop()
  if not lines:
    raise FeatureError(f'{path}: no lines; write one text a line')
  texts: list[tuple[str, str | None]] = []
  for number, line in enumerate(lines, 1):
    first, *rest = line.removesuffix('\r').split('\t')
    if len(rest) > 1:
      raise FeatureError(f'{path}: line {number}: {len(rest)} TABs; one TAB separates the two parts'
                         ' of a pair, so put spaces for the others')
    texts.append((first, rest[0] if rest else None))
  return texts


def encode(
    texts: Sequence[tuple[str, str | None]], tokenizer: encoding.Tokenizer, max_length: int,
    truncate: bool = False, name: str = 'texts',
) -> list[Row]:
  """[CLS] text [SEP], or [CLS] first [SEP] second [SEP], as input_ids, token_type_ids and mask.

  Args:
    texts: texts or pairs; None where there is no second part.
    tokenizer: text to ids.
    max_length: tokens that the model takes.
    truncate: cut what is longer (the longer part of a pair) instead of refusing it.
    name: what messages call the texts.

  Raises:
    FeatureError: texts that are too long, without `truncate`.
  """
  firsts = tokenizer.encode_batch([first for first, _ in texts])
  seconds = tokenizer.encode_batch([second or '' for _, second in texts])
  rows, long = [], []
  for number, (first, second, (_, pair)) in enumerate(zip(firsts, seconds, texts, strict=True), 1):
    length = len(first) + 2 if pair is None else len(first) + len(second) + 3
    if length > max_length:
      long.append((number, length))
    rows.append(examples.join(tokenizer, first, None if pair is None else second, max_length))
  if long and not truncate:
    others = f' (and {len(long) - 1} more lines are too long)' if len(long) > 1 else ''
    raise FeatureError(f'{name}: line {long[0][0]}: {long[0][1]} tokens, but the model takes'
                       f' {max_length}{others}; shorten the text, or cut it with --truncate')
  if long:
    logging.warning('%s: %d of %d texts were cut to %d tokens, the first in line %d', name,
                    len(long), len(texts), max_length, long[0][0])
  return rows


def hidden_states(
    model: api.Model, rows: Sequence[Row], layers: Sequence[int], pooling: str = 'none',
    batch_size: int = 32,
) -> Iterator[tuple[Int[np.ndarray, 'N'], Float32[np.ndarray, 'K N ...']]]:
  """Hidden states of the encoder, without dropout, every row once.

  A row is padded to a length that follows from its own, and batches are filled up to batch_size: so
  what it gets does not depend on the other rows.

  Args:
    model: of `api.load`.
    rows: of `encode`.
    layers: 0 is the output of the embeddings, L that of the last layer; -1 is the last, too.
    pooling: 'none': the vector of every token; 'cls': of the first; 'mean': their mean, [CLS] and
      [SEP] included.
    batch_size: rows of a batch.

  Yields:
    Numbers of some rows, and for each of the K layers their vectors: [K, N, D] if pooled, else
    [K, N, T, D] with T at least the longest of them.

  Raises:
    FeatureError: a layer that the model does not have or that is named twice, another pooling, or a
      pair for a model of one segment.
  """
  check_settings(model, rows, layers, pooling)
  params = jax.device_put(model.params)
  for indices, batch in _batches(
      rows, batch_size, model.tokenizer.pad_id, model.config.max_position_embeddings):
    vectors = _vectors(model.graphdef, params, batch, tuple(layers), pooling)
    yield indices, np.asarray(vectors)[:, :len(indices)]


def check_settings(
    model: api.Model, rows: Sequence[Row], layers: Sequence[int], pooling: str
) -> None:
  """Raises FeatureError for what `hidden_states` cannot do."""
  last = model.config.num_hidden_layers
  absent = [layer for layer in layers if not -last - 1 <= layer <= last]
  if absent or not layers:
    raise FeatureError(f'layers {", ".join(map(str, absent)) or "(none)"}: this model has layers 0'
                       f' (embeddings) to {last}, or -1 (the last) to {-last - 1}')
  if len(set(layers)) < len(layers):
    raise FeatureError(f'layers {", ".join(map(str, layers))}: name every layer once')
  if pooling not in POOLINGS:
    raise FeatureError(f'pooling {pooling!r} is none of {", ".join(POOLINGS)}')
  if model.config.type_vocab_size < 2 and any(row['token_type_ids'].any() for row in rows):
    raise FeatureError('this model knows one segment only and takes no pairs; join the two parts of'
                       ' each line with a space instead of a TAB')


# Static arguments, not a closure: a second call with the same model compiles nothing.
@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _vectors(
    graphdef: nnx.GraphDef, params: state.Params, batch: dict[str, jax.Array],
    layers: tuple[int, ...], pooling: str,
) -> Float[jax.Array, 'K B ...']:
  mask = batch['attention_mask']
  bert = nnx.merge(graphdef, params).bert
  states = bert.hidden_states(batch['input_ids'], batch['token_type_ids'], mask)
  chosen = jnp.stack([states[layer] for layer in layers]).astype(jnp.float32)
  if pooling == 'cls':
    return chosen[:, :, 0]
  if pooling == 'mean':
    # Rows that only fill the batch have no token at all.
    return (chosen * mask[..., None]).sum(2) / jnp.maximum(mask.sum(1), 1)[:, None]
  return chosen


def _batches(
    rows: Sequence[Row], batch_size: int, pad_id: int, max_length: int
) -> Iterator[tuple[Int[np.ndarray, 'N'], dict[str, Int32[np.ndarray, 'B T']]]]:
  """Rows of one padded length together, in their order; the last batch of each is filled up."""
  lengths = np.array([len(row['input_ids']) for row in rows])
  padded = np.minimum(-(-lengths // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, max_length)
  for length in np.unique(padded):
    members = np.flatnonzero(padded == length)
    logging.info('%d texts in batches of %d x %d', len(members), batch_size, length)
    for first in range(0, len(members), batch_size):
      indices = members[first:first + batch_size]
      batch = {field: np.full((batch_size, length), pad_id if field == 'input_ids' else 0, np.int32)
               for field in rows[0]}
      for place, index in enumerate(indices):
        for field, values in rows[index].items():
          batch[field][place, :len(values)] = values
      yield indices, batch


def write(
    model: api.Model, rows: Sequence[Row], path: epath.PathLike, layers: Sequence[int],
    pooling: str = 'none', batch_size: int = 32,
) -> None:
  """Writes the hidden states of all rows as an npz file, whole or not at all.

  Arrays: `layer_-1` (named as in `layers`), float32: with pooling [N, D]; without [tokens, D], all
  rows back to back, and beside them `row_splits` int64 [N + 1] (row i has tokens row_splits[i] to
  row_splits[i + 1]) and `input_ids` int32 [tokens].

  They are collected on disk, beside the file: memory does not grow with the number of rows.

  Args:
    path: the file to write.

  Raises:
    FeatureError: as `hidden_states`, or the path is a folder.
  """
  check_settings(model, rows, layers, pooling)
  path = epath.Path(path)
  if path.is_dir():
    raise FeatureError(f'{path}: is a folder; name the file to write, e.g. {path}/features.npz')
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = None if '://' in str(path) else str(path.parent)
  with tempfile.TemporaryDirectory(prefix=f'{path.name}.tmp.', dir=beside) as name:
    folder = epath.Path(name)
    _collect(model, rows, folder, layers, pooling, batch_size)
    temporary = path.parent / f'{path.name}.tmp'
    try:
      with temporary.open('wb') as file, zipfile.ZipFile(file, 'w') as archive:
        for array in sorted(folder.iterdir()):
          archive.write(array, array.name)
      temporary.replace(path)
    finally:
      temporary.unlink(missing_ok=True)


def _collect(
    model: api.Model, rows: Sequence[Row], folder: epath.Path, layers: Sequence[int],
    pooling: str, batch_size: int,
) -> None:
  """Writes every array as a .npy file of its own."""
  splits = np.cumsum([0, *(len(row['input_ids']) for row in rows)], dtype=np.int64)
  shape = (len(rows) if pooling != 'none' else int(splits[-1]), model.config.hidden_size)
  arrays = [np.lib.format.open_memmap(folder / f'layer_{layer}.npy', 'w+', np.float32, shape)
            for layer in layers]
  for indices, vectors in hidden_states(model, rows, layers, pooling, batch_size):
    for array, values in zip(arrays, vectors, strict=True):
      if pooling != 'none':
        array[indices] = values
        continue
      for index, row in zip(indices, values, strict=True):
        first, last = splits[index], splits[index + 1]
        array[first:last] = row[:last - first]
  for array in arrays:
    array.flush()
  if pooling == 'none':
    np.save(folder / 'row_splits.npy', splits)
    np.save(folder / 'input_ids.npy', np.concatenate([row['input_ids'] for row in rows]))
