"""A trained model from Python, with its tokenizer and its head.

    model = bertjax.load('runs/rte')            # a workdir, or a checkpoint of import_checkpoint
    model.encode(['A text.', 'Another.'])       # a vector for each
    model.predict([('A premise.', 'A hypothesis.')])
    model.fill_mask('Returns the [MASK] of the array.')   # a pre-trained one

A checkpoint carries its configuration and tokenizer, so a path is all that is needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import nnx
from jaxtyping import Float32

from bertjax import best, checkpoint, heads, sharding, state, warm_start
from bertjax.data import custom, squad, squad_windows, swag, tagging
from bertjax.data import rows as rows_lib
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.examples import Examples
from bertjax.evals import predictions, squad_answers
from bertjax.model import BertConfig


class HeadError(ValueError):
  """The model has no head for what it is asked; the message says which it has."""


class InputError(ValueError):
  """Inputs of another form than the head takes; the message says which."""


class MaskError(ValueError):
  """A sentence that cannot be filled in; the message says the mend."""


class Guess(NamedTuple):
  """One candidate for a masked position."""

  token: str
  probability: float


class Prediction(NamedTuple):
  """What a head says of one input.

  Attributes:
    label: classification: its name; multi_label: the names (a tuple); regression: the number;
      choice: the number of the ending; tagging: a tag for each word (a tuple); span: the answer.
    probabilities: by label name (classification, multi_label) or in the order of the endings;
      None where there are none.
  """

  label: Any
  probabilities: dict[str, float] | tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class Model:
  """A model with all that belongs to it.

  Attributes:
    config: sizes of the encoder.
    graphdef: the model without its parameters; `nnx.merge(graphdef, params)` is the model, and its
      `bert` the encoder.
    params: a nested dict of float32 arrays.
    tokenizer: the one that it was trained with.
    metadata: what the checkpoint says of itself: step, position, config, head, ...
  """

  config: BertConfig
  graphdef: nnx.GraphDef
  params: state.Params
  tokenizer: tokenizer_lib.Tokenizer
  metadata: dict[str, Any]

  @property
  def head(self) -> dict[str, Any]:
    """Kind, label names and facts of the head; {'kind': 'pretraining'} or 'encoder' without one."""
    return self.metadata.get('head', {'kind': 'pretraining'})

  def encode(
      self, texts: Iterable[str | tuple[str, str]], layer: int = -1, pooling: str = 'mean',
      batch_size: int = 32,
  ) -> Float32[np.ndarray, 'N D']:
    """A vector for each text, from the hidden states of a layer.

    Args:
      texts: texts or pairs; longer ones than the model takes are cut, which is logged.
      layer: 0 is the embeddings' output, -1 the last layer's.
      pooling: 'mean' over the tokens, or 'cls', the first one.
      batch_size: texts that are computed together; no result depends on it.

    Raises:
      FeatureError: a layer or pooling that there is not.
      InputError: what is neither a text nor a pair of them.
    """
    from bertjax import features  # it is built on this module

    if pooling == 'none':
      raise features.FeatureError("pooling 'none' gives no vector a text; see bertjax.features")
    texts = _checked('text', texts, batch_size)
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    rows = features.encode(pairs, self.tokenizer, self.config.max_position_embeddings, True)
    vectors = np.zeros((len(rows), self.config.hidden_size), np.float32)
    for indices, found in features.hidden_states(self, rows, (layer,), pooling, batch_size):
      vectors[indices] = found[0]
    return vectors

  def predict(self, inputs: Iterable[Any], batch_size: int = 32) -> list[Prediction]:
    """What the fine-tuned head says, in the order of the inputs.

    Args:
      inputs: classification, multi_label, regression: texts, or pairs of texts; choice: (first,
        list of endings), or (first, second, endings); tagging: texts (split at white space) or
        lists of words; span: (question, context).
      batch_size: inputs that are computed together.

    Raises:
      HeadError: the model was not fine-tuned.
      InputError: inputs of another form.
    """
    kind = self.head['kind']
    if kind not in _PREDICT:
      raise HeadError(f'this model has no head to predict with (its kind is {kind!r}): fine-tune '
                      'it with bertjax.finetune, or use encode or fill_mask')
    form = kind if kind in _FORMS else 'text'
    inputs = _checked(form, inputs, batch_size)
    return _PREDICT[kind](self, inputs, batch_size) if inputs else []

  @property
  def max_length(self) -> int:
    """Tokens of a row: as in fine-tuning, or all that the model takes."""
    lengths = self.metadata['config'].get('seq_lengths')
    return lengths[-1] if lengths else min(512, self.config.max_position_embeddings)

  def outputs(self, examples: Examples, batch_size: int) -> Float32[np.ndarray, 'N ...']:
    """What the head computes for each example, in float32; see evals.predictions."""
    if self.config.type_vocab_size < 2 and examples.has_pairs:
      raise InputError('this model knows one segment only and takes no pairs; join the two texts')
    lengths = self.metadata['config'].get('seq_lengths') or [
        length for length in (32, 64, 128, 256) if length < self.max_length] + [self.max_length]
    mesh = sharding.make_mesh(sharding.MeshSettings(), jax.local_devices()[:1])
    rows = min(batch_size, 1 << (len(examples) - 1).bit_length())  # few shapes, little waste
    with jax.set_mesh(mesh):
      predictor = predictions.Predictor(self._step, examples, lengths, rows, mesh)
      return predictor.run(jax.device_put(self.params)).outputs

  @functools.cached_property
  def _step(self) -> predictions.Step:
    return predictions.jit_outputs(self.graphdef, self.head['kind'], with_loss=False)

  def fill_mask(self, text: str, top: int = 5) -> list[list[Guess]]:
    """The likeliest tokens at each [MASK] of a sentence.

    Args:
      text: a sentence with the tokenizer's mask token in it, at least once.
      top: candidates for each mask.

    Raises:
      HeadError: the model has no masked-LM head.
      MaskError: no mask in the text, or more tokens than the position table holds.
    """
    if 'masked_lm' not in self.params:
      raise HeadError(f'this model has no masked-LM head (its kind is {self.head["kind"]!r})')
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
    # The table's last rows only pad it, and are no tokens.
    logits = self._masked_lm_logits(row, mask, positions)[:len(masked), :tokenizer.vocab_size]
    probabilities = np.asarray(jax.nn.softmax(logits))
    likeliest = np.argsort(-probabilities, axis=-1)[:, :top]
    return [[Guess(tokenizer.token(i), float(row[i])) for i in ids]
            for row, ids in zip(probabilities, likeliest, strict=True)]

  @functools.cached_property
  def _masked_lm_logits(self) -> Callable:
    def logits(params, input_ids, attention_mask, positions):
      model = nnx.merge(self.graphdef, params)
      return model(input_ids, jnp.zeros_like(input_ids), attention_mask, positions)[0]

    return functools.partial(jax.jit(logits), jax.device_put(self.params))


def load(path: epath.PathLike, step: int | None = None) -> Model:
  """Loads a checkpoint of pre-training, fine-tuning or import.

  Args:
    path: a workdir, its checkpoints folder, or one step's folder; of a fine-tuning workdir, or
      the folder of several runs, the best model is taken.
    step: which step; None is the newest complete one.

  Raises:
    CheckpointError: none there, none complete, or the step is absent or damaged.
  """
  path = epath.Path(path)
  if step is None:
    path = best.find(path) or path
  metadata = checkpoint.read_metadata(path, step)
  config = BertConfig(**metadata['config']['model'])
  params = checkpoint.restore_params(path, step)
  build = builder(config, metadata.get('head', {'kind': 'pretraining'}), params)
  graphdef, shapes = state.split(build)
  params, new, unused = warm_start.complete(params, shapes, build, seed=0)
  if new or unused:
    logging.warning('%s: newly initialised: %s; not used: %s', path, ', '.join(new) or 'nothing',
                    ', '.join(unused) or 'nothing')
  return Model(
      config=config, graphdef=graphdef, params=params,
      tokenizer=tokenizer_lib.load(checkpoint.tokenizer_folder(path, step)), metadata=metadata)


def builder(
    config: BertConfig, head: dict[str, Any], params: state.Params
) -> Callable[[nnx.Rngs], nnx.Module]:
  """From nnx.Rngs to the model that a checkpoint holds."""
  if head['kind'] in heads.HEADS:
    shape = heads.HeadConfig(**head['config']) if 'config' in head else heads.HeadConfig(
        head['kind'], _num_outputs(head, params))
    return lambda rngs: heads.HEADS[head['kind']](config, shape, rngs)
  if 'masked_lm' in params:
    return lambda rngs: heads.BertForPreTraining(config, rngs)
  return lambda rngs: heads.BertEncoder(config, rngs, pooler='pooler' in params['bert'])


def _num_outputs(head: dict[str, Any], params: state.Params) -> int:
  return params['qa_outputs' if head['kind'] == 'span' else 'classifier']['bias'].shape[0]


# --- What each kind of head takes --------------------------------------------------------------


def _is_text(value: Any) -> bool:
  return isinstance(value, str)


def _are_texts(value: Any, number: int | None = None) -> bool:
  return isinstance(value, (list, tuple)) and all(map(_is_text, value)) and (
      number is None or len(value) == number)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    'text': ('a text, or a pair (text, text)', lambda one: _is_text(one) or _are_texts(one, 2)),
    'choice': (f'(first, endings) or (first, second, endings) with {swag.NUM_CHOICES} endings',
               lambda one: isinstance(one, (list, tuple)) and len(one) in (2, 3)
               and _are_texts(one[:-1]) and _are_texts(one[-1], swag.NUM_CHOICES)),
    'tagging': ('a text, or a list of words', lambda one: _is_text(one) or _are_texts(one)),
    'span': ('(question, context)', lambda one: _are_texts(one, 2)),
}


def _checked(form: str, inputs: Any, batch_size: int) -> list[Any]:
  """The inputs as a list, each of the form."""
  described, fits = _FORMS[form]
  if isinstance(inputs, str):
    raise InputError(f'one text is given ({inputs[:40]!r}); give a list, each {described}')
  if batch_size < 1:
    raise InputError(f'batch_size is {batch_size}; it must be at least 1')
  inputs = list(inputs)
  for number, one in enumerate(inputs):
    if not fits(one):
      raise InputError(f'input {number} is {one!r:.80}; it must be {described}')
  return inputs


# --- What each kind of head predicts -----------------------------------------------------------


def _predict_rows(model: Model, inputs: list[str | tuple[str, str]], batch_size: int):
  pairs = [(text, None) if isinstance(text, str) else text for text in inputs]
  firsts, seconds = zip(*pairs, strict=True)
  if len({second is None for second in seconds}) > 1:
    raise HeadError('texts and pairs of texts at once; predict them one kind after the other')
  rows = rows_lib.Rows([str(n) for n in range(len(pairs))], list(firsts),
                       None if seconds[0] is None else list(seconds), None, 'inputs')
  found = model.outputs(rows_lib.encode(rows, model.tokenizer, model.max_length), batch_size)
  kind, labels = model.head['kind'], model.head.get('labels', [])
  probabilities = custom.probabilities(kind, found)
  if kind == 'regression':
    return [Prediction(float(value), None) for value in found[:, 0]]
  named = [dict(zip(labels, map(float, row), strict=True)) for row in probabilities]
  if kind == 'multi_label':
    return [Prediction(tuple(name for name, p in row.items() if p > 0.5), row) for row in named]
  return [Prediction(max(row, key=row.get), row) for row in named]


def _predict_choices(model: Model, inputs: list[tuple], batch_size: int):
  parts = [(row[0], '', row[1]) if len(row) == 2 else row for row in inputs]
  rows = swag.Rows([str(n) for n in range(len(parts))], [part[0] for part in parts],
                   [part[1] for part in parts], [list(part[2]) for part in parts], None)
  found = model.outputs(swag.encode(rows, model.tokenizer, model.max_length), batch_size)
  return [Prediction(int(row.argmax()), tuple(map(float, row)))
          for row in custom.probabilities('classification', found)]


def _predict_tags(model: Model, inputs: list[str | list[str]], batch_size: int):
  words = [text.split() if isinstance(text, str) else list(text) for text in inputs]
  filled = [row for row in words if row]
  tags = iter(())
  if filled:
    sentences = tagging.Sentences('inputs', filled, None, [[0] * len(row) for row in filled], 'bio')
    windows = tagging.encode(sentences, model.tokenizer, model.head['labels'], model.max_length,
                             model.head.get('stride') or None)
    tags = iter(tagging.predictions(windows, model.outputs(windows.examples, batch_size)))
  return [Prediction(tuple(next(tags)) if row else (), None) for row in words]


def _predict_answers(model: Model, inputs: list[tuple[str, str]], batch_size: int):
  head = model.head
  questions = tuple(squad.Question(id=str(number), question=question, context=context, answers=(),
                                   is_impossible=False)
                    for number, (question, context) in enumerate(inputs))
  windows = squad_windows.windows(
      questions, model.tokenizer, model.max_length, head.get('doc_stride', 128),
      head.get('max_query_length', min(64, model.max_length // 3)))
  found = {}
  if len(windows):
    found = squad_answers.answers(
        windows, questions, model.outputs(windows.examples, batch_size), head.get('version', 1),
        head.get('n_best_size', 20), head.get('max_answer_length', 30),
        head.get('null_threshold', 0.0)).predictions
  return [Prediction(found.get(question.id, ''), None) for question in questions]


_PREDICT = {
    'classification': _predict_rows,
    'regression': _predict_rows,
    'multi_label': _predict_rows,
    'choice': _predict_choices,
    'tagging': _predict_tags,
    'span': _predict_answers,
}


def _round_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple
