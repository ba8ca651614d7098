"""Pre-training as a job of the loop: masked LM and next sentence on shards of text."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_collections
from absl import logging
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from bertjax import (
  attention,
  auto_mesh,
  best,
  checkpoint,
  heads,
  metrics,
  model,
  objectives,
  sharding,
  state,
  step_folder,
  train,
  warm_start,
)
from bertjax import config as config_lib
from bertjax import settings as settings_lib
from bertjax.alarms import Alarms
from bertjax.config import ConfigError
from bertjax.data import bucketing, packing, pipeline, prepare, pretrain, shards
from bertjax.data.encoding import Tokenizer
from bertjax.data.sampling import SamplingError
from bertjax.evals.pretraining import PretrainingEvaluator
from bertjax.job import Job, Stage
from bertjax.settings import Settings


@dataclasses.dataclass(frozen=True)
class _Setup:
  """What the parts of a job are made from."""

  settings: Settings
  corpora: prepare.Corpora
  bert: model.BertConfig
  mesh: Mesh


def run(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Pre-trains as configs/*.py say; the exit code is that of `train.train`.

  Raises:
    One of errors.EXPECTED, in words.
  """
  return train.train(job(config, epath.Path(workdir)), workdir)


def job(config: ml_collections.ConfigDict, workdir: epath.Path) -> Job:
  """Checks the settings, opens (or builds) the data, and says what is to be trained.

  A signal ends the process at once while it is here: a build goes on where it was.
  """
  settings = settings_lib.from_config(_with_stored_model(config, workdir))
  if not settings.mesh.auto:  # before data are built, which may take hours
    _mesh(settings, settings.mesh)
  corpora = prepare.open_corpora(_data_paths(settings, workdir))
  bert = settings.bert_config(corpora.tokenizer.vocab_size)
  mesh = _mesh(settings, auto_mesh.resolve(
      settings.mesh, lambda rngs: heads.BertForPreTraining(bert, rngs), settings.optimizer_of(0),
      tuple(phase.batch_size // phase.accumulate for phase in settings.phases),
      bert.num_attention_heads))
  lengths = (length for phase in settings.phases for length in phase.lengths)
  placed = (mesh.devices.flat[0].platform, *lengths)
  ways = mesh.shape['model']
  why = attention.describe(bert, *placed, model_ways=ways)
  bert = dataclasses.replace(bert, attention=attention.choose(bert, *placed, model_ways=ways))
  setup = _Setup(settings, corpora, bert, mesh)
  build = lambda rngs: heads.BertForPreTraining(bert, rngs)
  resolved = settings_lib.to_json(settings) | {'model': model.to_store(bert)}
  return Job(
      title='pre-training', build=build, mesh=mesh,
      stages=tuple(_stage(setup, i) for i in range(len(settings.phases))), seed=settings.seed,
      metadata={'config': resolved, 'data_hash': corpora.content_hash,
                'tokenizer_hash': corpora.tokenizer.hash(), 'head': {'kind': 'pretraining'}},
      tokenizer=corpora.tokenizer_folder, checkpoint=settings.checkpoint,
      log_every=settings.log_every, evaluate_every=settings.heldout.every,
      open_evaluator=lambda: _evaluator(setup), alarms=_alarms(setup),
      baselines={'unigram_entropy': corpora.unigram_entropy},
      initial=(lambda: _initial(setup, build)) if settings.init_from else None,
      differences=lambda stored, step: settings_lib.differences(stored, resolved, step),
      describe=lambda: [*_describe(setup), f'attention   {why}'], farewell=_farewell)


def _mesh(settings: Settings, asked: sharding.MeshSettings) -> Mesh:
  """The mesh, by which all batches must be divisible."""
  mesh = sharding.make_mesh(asked)
  settings_lib.check_batches(settings, sharding.row_ways(mesh.shape))
  return mesh


def _with_stored_model(config: ml_collections.ConfigDict, workdir: epath.Path) -> dict[str, Any]:
  """With init_from, the sizes that the configuration leaves out are those of the checkpoint.

  A run that is resumed has them itself: what it began from may be gone by then.
  """
  values = config_lib.plain(config)
  if values.get('init_from'):
    begun = step_folder.steps(step_folder.absolute(workdir) / step_folder.FOLDER)
    origin = workdir if begun else best.find(values['init_from']) or values['init_from']
    stored = checkpoint.read_metadata(origin)['config']['model']
    values['model'] = stored | {'vocab_size': 0} | dict(values.get('model', {}))
  return values


def _data_paths(settings: Settings, workdir: epath.Path) -> tuple[str, ...]:
  data = settings.data
  if data.paths:
    return data.paths
  return (prepare.build_from_text(
      workdir, inputs=data.input, format=data.format, language=data.language,
      tokenizer_type=data.tokenizer_type, vocab_size=data.vocab_size, heldout=data.heldout,
      num_workers=data.num_workers, process_index=jax.process_index(),
      process_count=jax.process_count(), barrier=multihost_utils.sync_global_devices),)


class _Stream:
  """The examples of a phase, alone in their rows or packed, as batches (a job.Stream)."""

  def __init__(self, setup: _Setup, phase: int):
    data = setup.settings.data
    examples = pretrain.ExampleStream(
        setup.corpora.train, setup.corpora.tokenizer, setup.settings.pretrain_settings(phase),
        weights=data.weights or None, sampling_exponent=data.sampling_exponent)
    here = setup.settings.phases[phase]
    self._batch_size, self._rows = here.batch_size, examples
    self._own_rows = sharding.own_rows(setup.mesh, here.batch_size)
    self.examples_per_row, self.mean_length = 1.0, float(here.seq_length)
    self.statistics = dataclasses.asdict(examples.statistics)
    if here.max_examples_per_row > 1:
      self._rows = packing.PackedStream(examples, here.max_examples_per_row)
      self.examples_per_row = self._rows.examples_per_row
      self.statistics['packed_real_tokens'] = self._rows.real_tokens
    self.shapes = (self._rows.batch_shapes(here.batch_size),)
    if here.seq_lengths:
      self._rows = bucketing.BucketedStream(examples, here.seq_lengths, here.batch_size)
      self.statistics['bucketed_real_tokens'] = self._rows.real_tokens
      self.shapes = tuple(
          self._rows.batch_shapes(here.batch_size, length) for length in here.seq_lengths)
      self.mean_length = self._rows.mean_length

  def batches(self, first: int, num_steps: int) -> Iterator[pretrain.Batch]:
    return pipeline.batches(self._rows, self._batch_size, first, num_steps, self._own_rows)


def _stage(setup: _Setup, number: int) -> Stage:
  settings, bert = setup.settings, setup.bert
  phase, examples = settings.phases[number], settings.pretrain_settings(number)
  optimizer = settings.optimizer_of(number)
  begins = max(i for i in range(number + 1) if settings.phases[i].learning_rate or i == 0)
  packed = phase.max_examples_per_row > 1
  return Stage(
      objective=objectives.pretraining(packed),
      num_steps=phase.num_steps, batch_size=phase.batch_size, optimizer=optimizer,
      open=lambda: _Stream(setup, number), accumulate=phase.accumulate,
      warmup_end=settings.starts()[begins] + optimizer.warmup_steps,
      restart_moments=phase.restart_moments, restart_schedule=phase.learning_rate > 0,
      flops_per_row=lambda length: metrics.model_flops_per_example(
          hidden_size=bert.hidden_size, num_hidden_layers=bert.num_hidden_layers,
          intermediate_size=bert.intermediate_size, vocab_size=bert.vocab_size,
          seq_length=round(length),
          num_predictions=bucketing.num_predictions(examples, round(length))))


def _evaluator(setup: _Setup) -> PretrainingEvaluator | None:
  """Over the held-out split, in examples of the first phase; None if nothing is held out."""
  settings, corpora = setup.settings, setup.corpora
  if not corpora.heldout:
    logging.warning('No held-out documents: nothing will be evaluated')
    return None
  graphdef, _ = state.split(lambda rngs: heads.BertForPreTraining(setup.bert, rngs))
  return evaluator_on(
      corpora.heldout, corpora.tokenizer, settings, graphdef, setup.mesh,
      batch_size=settings.heldout.batch_size or settings.phases[0].batch_size,
      max_examples=settings.heldout.max_examples)


def evaluator_on(
    splits: tuple[shards.Split, ...], tokenizer: Tokenizer, settings: Settings,
    graphdef: nnx.GraphDef, mesh: Mesh, *, batch_size: int, max_examples: int | None,
    seq_length: int | None = None,
) -> PretrainingEvaluator:
  """An evaluator whose masks depend on neither seed nor step of a run."""
  examples = dataclasses.replace(settings.pretrain_settings(0), seed=0)
  if seq_length:
    examples = dataclasses.replace(examples, seq_length=seq_length, max_predictions_per_seq=0)
  try:
    stream = pretrain.ExampleStream(
        splits, tokenizer, examples, heldout=True, max_examples=max_examples)
  except SamplingError as error:
    logging.warning('Held-out documents are evaluated without sentence pairs: %s', error)
    examples = dataclasses.replace(examples, next_sentence='none')
    stream = pretrain.ExampleStream(
        splits, tokenizer, examples, heldout=True, max_examples=max_examples)
  # Filled up to what the devices divide; the fillers weigh nothing.
  ways = sharding.row_ways(mesh.shape)
  rows = -(-batch_size // ways) * ways
  batches = pipeline.heldout_batches(stream, rows, sharding.own_rows(mesh, rows))
  return PretrainingEvaluator(graphdef, batches, mesh, stream.num_examples)


def _alarms(setup: _Setup) -> Alarms:
  """Judges a fifth of the run at a time: 100 steps at least, 2,000 at most."""
  return Alarms(setup.corpora.unigram_entropy,
                window_steps=max(100, min(2000, setup.settings.num_steps // 5)))


def _initial(setup: _Setup, build) -> tuple[state.Params, str]:
  """The weights of `init_from`; heads that it lacks are new and named."""
  path = str(best.find(setup.settings.init_from) or setup.settings.init_from)
  stored: Mapping[str, Any] = checkpoint.read_metadata(path)
  if stored['tokenizer_hash'] != setup.corpora.tokenizer.hash():
    raise ConfigError(f'init_from {path} was trained with another tokenizer than the shards; build '
                      'the shards with the tokenizer in its checkpoint: --tokenizer '
                      f'{checkpoint.tokenizer_folder(path)}')
  _, shapes = state.split(build)
  params, new, unused = warm_start.complete(
      checkpoint.restore_params(path), shapes, build, setup.settings.seed)
  return params, warm_start.in_words(path, stored['step'], new, unused)


# --- What the user sees ------------------------------------------------------------------------


def _describe(setup: _Setup) -> list[str]:
  settings, corpora, bert = setup.settings, setup.corpora, setup.bert
  tokens = sum(split.num_tokens for split in corpora.train)
  documents = sum(split.num_documents for split in corpora.train)
  _, shapes = state.split(lambda rngs: heads.BertForPreTraining(bert, rngs))
  lines = [
      f'model       {bert.num_hidden_layers} layers, {bert.hidden_size} wide, '
      f'{bert.num_attention_heads} heads; {state.count_parameters(shapes):,} parameters, '
      f'computing in {bert.dtype}, dropout {bert.hidden_dropout_prob}',
      f'vocabulary  {bert.vocab_size:,} (padded to {bert.padded_vocab_size:,}), '
      f'{corpora.tokenizer.type}',
      f'data        {documents:,} documents, {tokens:,} tokens, hash '
      f'{corpora.content_hash[:12]}, unigram entropy {corpora.unigram_entropy:.3f} nats',
      f'task        masked_lm, next_sentence={settings.data.next_sentence}, whole words: '
      f'{settings.data.whole_word_masking}',
  ]
  for i, phase in enumerate(settings.phases):
    rate = settings.optimizer_of(i)
    packed = phase.max_examples_per_row
    rows = ' or '.join(map(str, phase.lengths))
    lines.append(
        f'phase {i}     {phase.num_steps:,} steps of {phase.batch_size} x {rows} '
        f'({"at most " if phase.seq_lengths else ""}{phase.batch_size * phase.seq_length:,} tokens '
        'a step, accumulated over '
        f'{phase.accumulate}{f", packed up to {packed} in a row" if packed > 1 else ""}); rate '
        f'{rate.learning_rate:g}, warm-up {rate.warmup_steps:,} of {rate.num_steps:,}')
  lines.append(f'steps       {settings.num_steps:,} in all; bias correction: '
               f'{settings.optimizer_of(0).bias_correction}')
  return lines


def _farewell(workdir: epath.Path) -> list[str]:
  return [
      f'  python -m bertjax.tools.plot {workdir}',
      f"  python -m bertjax.tools.fill_mask --checkpoint {workdir} 'Returns the [MASK] value.'",
      f'  python -m bertjax.tools.inspect --checkpoint {workdir}',
  ]
