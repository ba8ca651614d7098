"""Batches of pre-training rows through tf.data, ahead of the training step, as numpy arrays.

The rows of a step follow from its number, so there is no state here: a resume begins at another
step, and each process asks for its own share.
"""

import weakref
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from bertjax.data.pretrain import Batch, ExampleStream

_PREFETCH = 4


@runtime_checkable
class Rows(Protocol):
  """Rows of batches, each a pure function of its number.

  ExampleStream, packing.PackedStream, bucketing.BucketedStream.
  """

  def batch(self, indices: Int[np.ndarray, 'b']) -> Batch:
    """The rows with the given numbers."""
    ...

  def batch_shapes(
      self, batch_size: int
  ) -> dict[str, tuple[tuple[int | None, ...], type[np.generic]]]:
    """Shape and type of each field of `batch_size` rows; None is what differs between batches."""
    ...


def batches(
    stream: Rows,
    batch_size: int,
    first_step: int,
    num_steps: int,
    own_rows: Int[np.ndarray, 'b'] | None = None,
) -> Iterator[Batch]:
  """Batches of steps first_step, first_step + 1, ... through tf.data, as numpy arrays.

  Step s holds rows s * batch_size to (s + 1) * batch_size - 1 of the stream.

  Args:
    stream: where the rows come from; a row is an example, or several packed ones.
    batch_size: of the whole run, B.
    first_step: counted from 0; a run that resumes passes the number of steps done.
    num_steps: how many batches there are.
    own_rows: which of the rows of every batch are wanted (sharding.own_rows); None: all.
  """
  own = np.arange(batch_size) if own_rows is None else own_rows

  def make(step: np.int64) -> Batch:
    return stream.batch(int(step) * batch_size + own)

  return _through_tf_data(make, first_step, first_step + num_steps, stream.batch_shapes(len(own)))


def heldout_batches(
    stream: ExampleStream,
    batch_size: int,
    own_rows: Int[np.ndarray, 'b'] | None = None,
) -> Iterator[Batch]:
  """All examples of a held-out stream once; the last batch is filled up with rows of weight 0.

  Every process gets the same number of batches. Filler rows are padding only, with all weights 0.

  Args:
    stream: where the examples come from.
    batch_size: of the whole run, B.
    own_rows: which of the rows of every batch are wanted (sharding.own_rows), ascending; None: all.
  """
  own = np.arange(batch_size) if own_rows is None else own_rows
  for begin in range(0, stream.num_examples, batch_size):
    numbers = begin + own
    real = stream.batch(numbers[numbers < stream.num_examples])
    fillers = {'input_ids': stream.tokenizer.pad_id}
    yield {name: _fill_up(rows, len(own), fillers.get(name, 0)) for name, rows in real.items()}


def _fill_up(
    rows: Shaped[np.ndarray, 'n ...'], size: int, filler: int
) -> Shaped[np.ndarray, 'b ...']:
  out = np.full((size, *rows.shape[1:]), filler, rows.dtype)
  out[: len(rows)] = rows
  return out


def _through_tf_data(make, begin, end, shapes):
  """Calls `make(step)` for each step in a tf.data pipeline that runs ahead of its reader."""
  import tensorflow as tf  # here, since it takes seconds to load

  for kind in ('GPU', 'TPU'):
    if tf.config.list_physical_devices(kind):
      tf.config.set_visible_devices([], kind)  # they belong to JAX

  def to_tensors(step):
    types = [dtype for _, dtype in shapes.values()]
    arrays = tf.numpy_function(lambda s: list(make(s).values()), [step], types, stateful=False)
    for array, (shape, _) in zip(arrays, shapes.values(), strict=True):
      array.set_shape(shape)
    return dict(zip(shapes, arrays, strict=True))

  options = tf.data.Options()
  options.deterministic = True
  options.autotune.enabled = False
  options.threading.private_threadpool_size = 2
  options.threading.max_intra_op_parallelism = 1
  steps = tf.data.Dataset.range(begin, end).map(to_tensors).prefetch(_PREFETCH)
  return _Reader(steps.with_options(options).as_numpy_iterator())


class _Reader:
  """An iterator that ends its pipeline before the interpreter does.

  The pipeline's thread calls Python. If it were still at work while the interpreter shuts down, it
  would wait for Python and TensorFlow's shutdown for it, forever.
  """

  def __init__(self, iterator: Iterator[Batch]):
    self._held = [iterator]
    weakref.finalize(self, self._held.clear)  # called at exit as well

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return next(self._held[0])
