"""Fine-tuning as a job of the loop.

    init_from ── sizes, tokenizer, weights ──┐
    Task ── examples, head, scores ──────────┴──> Job ──> train.train
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

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
  warm_start,
)
from bertjax import config as config_lib
from bertjax.config import ConfigError
from bertjax.data import examples as examples_lib
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.encoding import Tokenizer
from bertjax.evals import predictions
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import CUSTOM, Split, Task
from bertjax.job import CheckpointSettings, Job, Scores, Stage
from bertjax.model import BertConfig


class Origin(NamedTuple):
  """The checkpoint that a run begins with.

  Attributes:
    path: as given.
    metadata: what it says of itself.
    tokenizer: its tokenizer.
    tokenizer_folder: whose files every checkpoint of the run carries.
  """

  path: epath.Path
  metadata: dict[str, Any]
  tokenizer: Tokenizer
  tokenizer_folder: epath.Path

  @property
  def head(self) -> dict[str, Any]:
    return self.metadata.get('head', {'kind': 'pretraining'})


def open_origin(path: str) -> Origin:
  """A checkpoint to begin with; of a fine-tuning workdir, or of several runs, the best model.

  Raises:
    ConfigError: nothing is given.
    CheckpointError: there is no complete checkpoint.
  """
  if not path:
    raise ConfigError('init_from is empty: give --config.init_from=CHECKPOINT, from bertjax.main '
                      'or bertjax.convert.import_checkpoint')
  folder = best.find(path) or step_folder.absolute(path)
  if not folder.exists():
    raise ConfigError(f'init_from {path}: no such folder; give a checkpoint of bertjax.main or '
                      'bertjax.convert.import_checkpoint')
  tokenizer_folder = checkpoint.tokenizer_folder(folder)
  return Origin(folder, checkpoint.read_metadata(folder), tokenizer_lib.load(tokenizer_folder),
                tokenizer_folder)


def bert_config(settings: Settings, origin: Origin, mesh: jax.sharding.Mesh) -> BertConfig:
  """The checkpoint's sizes with what the configuration changes, and attention as it can be had.

  Raises:
    AttentionError: an implementation of attention that cannot do what the configuration asks.
    ConfigError: a change of what the weights depend on, or rows longer than the positions.
  """
  stored = origin.metadata['config']['model']
  free = ('dtype', 'remat', 'scan_unroll', 'attention', 'hidden_dropout_prob',
          'attention_probs_dropout_prob')
  for name, value in settings.model.items():
    if name not in free and stored.get(name) != value:
      raise ConfigError(f'model.{name} is {value}, but {stored.get(name)} in {origin.path}; only '
                        f'{", ".join(free)} may be changed')
  config = config_lib.build(BertConfig, stored | dict(settings.model), 'model')
  if settings.seq_length > config.max_position_embeddings:
    raise ConfigError(f'seq_length is {settings.seq_length}, but the model has '
                      f'{config.max_position_embeddings} positions')
  chosen = attention.choose(config, mesh.devices.flat[0].platform, *settings.seq_lengths,
                            model_ways=mesh.shape['model'])
  return dataclasses.replace(config, attention=chosen)


def with_lengths(
    settings: Settings, parts: Sequence[examples_lib.Examples], num_epochs: int
) -> Settings:
  """The settings with lengths of rows: their own, or those that suit all these examples."""
  if settings.seq_lengths:
    return settings
  lengths = np.concatenate([part.lengths for part in parts])
  num_batches = num_epochs * len(lengths) // settings.batch_size
  multiple = math.lcm(4, attention.row_multiple(settings.model.get('attention', 'auto')))
  return dataclasses.replace(settings, seq_lengths=examples_lib.choose_lengths(
      lengths, settings.seq_length, num_batches, multiple))


def check_segments(bert: BertConfig, parts: Sequence[examples_lib.Examples]) -> None:
  """Refuses pairs where the model cannot tell their texts apart.

  Raises:
    ConfigError: it has an embedding of one segment only.
  """
  if bert.type_vocab_size < 2 and any(part.has_pairs for part in parts):
    raise ConfigError('this model knows one segment only (type_vocab_size 1) and takes no pairs of '
                      'texts; join them into one text, or take another model')


def open_mesh(settings: Settings, origin: Origin, head: heads.HeadConfig) -> jax.sharding.Mesh:
  """The mesh that the settings ask for, or one that fits the model and the devices (mesh.auto).

  Raises:
    MeshError: the devices cannot form it.
  """
  asked = settings.mesh
  if asked.auto:
    sizes = bert_config(settings, origin, sharding.make_mesh(sharding.MeshSettings()))
    asked = auto_mesh.resolve(
        asked, lambda rngs: heads.HEADS[head.kind](sizes, head, rngs),
        settings.optimizer_settings(1), (settings.batch_size // settings.accumulate,),
        sizes.num_attention_heads)
  return sharding.make_mesh(asked)


def job(settings: Settings, workdir: epath.Path, origin: Origin, task: Task) -> Job:
  """What the loop needs to know of this fine-tuning."""
  parts = [task.train, *(split.examples for split in task.splits)]
  settings = with_lengths(settings, parts, settings.num_epochs)
  head = heads.HeadConfig(task.kind, task.num_outputs, **dataclasses.asdict(settings.head))
  mesh = open_mesh(settings, origin, head)
  _check_batch(settings, mesh)
  bert = bert_config(settings, origin, mesh)
  check_segments(bert, parts)
  build = lambda rngs: heads.HEADS[task.kind](bert, head, rngs)
  stream = examples_lib.EpochBatches(
      task.train, settings.seq_lengths, settings.batch_size, settings.seed,
      sharding.own_rows(mesh, settings.batch_size))
  num_steps = settings.num_epochs * stream.steps_per_epoch
  evaluate_every = settings.evaluate.every or stream.steps_per_epoch
  resolved = settings_lib.to_json(settings) | {'model': model.to_store(bert)}
  metadata = {
      'config': resolved, 'data_hash': _content_hash(task),
      'tokenizer_hash': origin.tokenizer.hash(),
      'head': {'kind': task.kind, 'labels': list(task.labels), 'task': task.name,
               'config': dataclasses.asdict(head)} | task.facts}
  metric = settings.evaluate.metric or task.metric
  keeper = best.Keeper(workdir, metric, evaluate_every, settings.evaluate.patience, metadata,
                       origin.tokenizer_folder, task.learned)
  optimizer = settings.optimizer_settings(num_steps)
  if optimizer.freeze_layers > bert.num_hidden_layers:
    raise ConfigError(f'optimizer.freeze_layers is {optimizer.freeze_layers}, but the model has '
                      f'{bert.num_hidden_layers} layers')
  rows = task.train.tokens['input_ids'][0].size // task.train.tokens['input_ids'][0].shape[-1]
  stage = Stage(
      objective=objectives.fine_tuning(task.kind), num_steps=num_steps,
      batch_size=settings.batch_size, optimizer=optimizer, open=lambda: stream,
      accumulate=settings.accumulate,
      flops_per_row=lambda length: rows * metrics.model_flops_per_example(
          hidden_size=bert.hidden_size, num_hidden_layers=bert.num_hidden_layers,
          intermediate_size=bert.intermediate_size, vocab_size=bert.vocab_size,
          seq_length=round(length), num_predictions=0))
  return Job(
      title=f'fine-tuning: {task.name}', build=build,
      stages=(stage,),
      baselines={f'baseline/{name}': value for name, value in task.baseline.items()
                 if value is not None}, mesh=mesh, seed=settings.seed,
      metadata=metadata, tokenizer=origin.tokenizer_folder,
      checkpoint=CheckpointSettings(
          settings.checkpoint.every or stream.steps_per_epoch, settings.checkpoint.keep_last),
      log_every=settings.log_every, evaluate_every=evaluate_every,
      open_evaluator=lambda: _evaluator(settings, build, task, mesh, metric),
      initial=None if settings.from_scratch else lambda: _initial(settings, origin, task, build),
      differences=lambda stored, step: _differences(stored, resolved),
      describe=lambda: _describe(settings, origin, task, bert, head, stream, optimizer),
      judge=keeper.judge, forget=keeper.forget, is_over=keeper.is_over, farewell=_farewell)


def _check_batch(settings: Settings, mesh: jax.sharding.Mesh) -> None:
  ways = sharding.row_ways(mesh.shape) * settings.accumulate
  if settings.batch_size % ways:
    near = max(ways, round(settings.batch_size / ways) * ways)
    raise ConfigError(f'batch_size {settings.batch_size} is not divisible by data * fsdp * '
                      f'accumulate = {ways}; try {near}')


def _content_hash(task: Task) -> str:
  """Of all that the model is trained on and judged by."""
  digest = hashlib.sha256()
  for examples in (task.train, *(split.examples for split in task.splits)):
    for name, arrays in sorted(examples.tokens.items()):
      digest.update(f'{name} {len(arrays)}\n'.encode())
      for array in arrays:
        digest.update(np.int64(array.shape[-1]).tobytes() + array.tobytes())
    for name, values in sorted(examples.values.items()):
      digest.update(f'{name} {values.shape} {values.dtype}\n'.encode() + values.tobytes())
  return digest.hexdigest()


def _differences(stored: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
  """What forbids going on with a workdir."""
  if stored.get('init_from', resolved['init_from']) != resolved['init_from']:
    logging.warning('This workdir began from %s; init_from=%s is not looked at',
                    stored['init_from'] or 'nothing', resolved['init_from'] or "''")
  return settings_lib.differences(stored, resolved)


def same_head(origin: Origin, task: Task) -> bool:
  """Whether the checkpoint's head is of this very task: labels go by name and order.

  QNLI and RTE, or QQP and MRPC, may call theirs the same: then the name of the task tells. Texts of
  one's own may be given to the head of any task.
  """
  if origin.head['kind'] != task.kind:
    return False
  names = {origin.head.get('task', task.name), task.name}
  if task.kind in ('classification', 'regression') and len(names) > 1 and CUSTOM not in names:
    return False
  # What a regression calls its one output means nothing.
  return task.kind == 'regression' or tuple(origin.head.get('labels', ())) == task.labels


def need_kind(origin: Origin, kind: str) -> None:
  """Raises ConfigError if the checkpoint's head is not of a kind, before data are read for it."""
  if origin.head['kind'] != kind:
    raise ConfigError(f'{origin.path} has a head of kind {origin.head["kind"]}, and the task is of '
                      f'kind {kind}; fine-tune it first (mode=train)')


def _initial(settings, origin: Origin, task: Task, build) -> tuple[state.Params, str]:
  """The encoder of the checkpoint, and its head if that is of this very task."""
  _, shapes = state.split(build)
  drop = () if same_head(origin, task) else ('classifier', 'qa_outputs', 'layer_weights')
  params, new, unused = warm_start.complete(
      checkpoint.restore_params(origin.path), shapes, build, settings.seed, drop)
  return params, warm_start.in_words(str(origin.path), origin.metadata['step'], new, unused)


def _farewell(workdir: epath.Path) -> list[str]:
  stored = best.read(workdir)
  kept = [] if stored is None else [
      f'  the best model, of step {stored["step"]}, is in {workdir / best.FOLDER}: '
      f'{_rounded(stored["scores"])}']
  return [
      *kept,
      f'  python -m bertjax.tools.plot {workdir}',
      '  the same command with --config.mode=predict',
      f'  python -m bertjax.convert.export --checkpoint {workdir} --to hf --output hf_dir/']


def _rounded(scores: Scores) -> str:
  return ', '.join(f'{name} {"undefined" if value is None else format(value, ".4f")}'
                   for name, value in scores.items()) or 'none'


def _describe(settings, origin, task, bert, head, stream, optimizer) -> list[str]:
  shapes = ', '.join(' x '.join(map(str, shape['input_ids'][0])) for shape in stream.shapes)
  splits = ', '.join(f'{split.name} {len(split.examples):,}' for split in task.splits) or 'none'
  frozen = f', frozen: {optimizer.freeze}' if optimizer.freeze != 'none' else ''
  if optimizer.freeze_layers:
    frozen += f', first {optimizer.freeze_layers} layers frozen'
  return [
      f'model       {bert.num_hidden_layers} layers, {bert.hidden_size} wide; computing in '
      f'{bert.dtype}, dropout {bert.hidden_dropout_prob}, head {head.dropout}, attention '
      f'{bert.attention}',
      f'head        {task.kind}, {head.num_outputs} output(s) {list(task.labels)[:12]}, reads '
      f'{head.layers}',
      f'data        {len(task.train):,} training examples; evaluated on {splits}',
      f'shapes      {shapes}; {stream.statistics["padding"]:.1%} padding',
      f'baseline    {_rounded(task.baseline)}',
      f'steps       {optimizer.num_steps:,} = {settings.num_epochs} epochs of '
      f'{stream.steps_per_epoch:,}; rate {optimizer.learning_rate:g}, warm-up '
      f'{optimizer.warmup_steps:,}, layer decay {optimizer.layer_decay:g}, bias correction: '
      f'{optimizer.bias_correction}{frozen}',
  ]


# --- Evaluation ---------------------------------------------------------------------------------


class TaskEvaluator:
  """Scores of all splits together (a job.Evaluator).

  Those of the first split have their plain names, those of others the split's before it.
  """

  split = 'dev'

  def __init__(self, splits: tuple[tuple[Split, predictions.Predictor], ...]):
    self._splits = splits

  def run(self, params: state.Params, stopped=lambda: False) -> Scores | None:
    """The scores and, where examples have targets, the loss; None if `stopped` in between."""
    scores: Scores = {}
    for number, (split, predictor) in enumerate(self._splits):
      found = predictor.run(params, stopped)
      if found is None:
        return None
      own = ({} if found.loss is None else {'loss': found.loss}) | split.scores(found.outputs)
      scores |= {name if number == 0 else f'{split.name}/{name}': value
                 for name, value in own.items()}
    return scores


def predictors(
    settings: Settings, build, task: Task, splits: tuple[Split, ...], mesh: jax.sharding.Mesh
) -> tuple[tuple[Split, predictions.Predictor], ...]:
  """One of each split; all share a compiled function.

  Raises:
    ConfigError: a split without examples, e.g. questions whose contexts are all empty.
  """
  empty = [split.name for split in splits if not len(split.examples)]
  if empty:
    raise ConfigError(f'{", ".join(empty)}: there is nothing in it that a model could look at')
  graphdef, _ = state.split(build)
  with_loss = all(predictions.has_targets(split.examples) for split in splits)
  step = predictions.jit_outputs(graphdef, task.kind, with_loss)
  size = settings.evaluate.batch_size or settings.batch_size
  return tuple((split, predictions.Predictor(
      step, split.examples, settings.seq_lengths, size, mesh)) for split in splits)


def _evaluator(settings, build, task: Task, mesh, metric: str) -> TaskEvaluator | None:
  splits = task.splits
  unlabelled = [split.name for split in splits if split.scores is None]
  if unlabelled:
    raise ConfigError(f'{", ".join(unlabelled)} has no labels: nothing could be evaluated; give a '
                      'labelled file, or none')
  if not splits:
    logging.warning('No dev data: nothing is evaluated, and the last model is the best')
    return None
  targets = all(predictions.has_targets(split.examples) for split in splits)
  names = {*task.baseline, *(('loss',) if targets else ())}
  known = names | {f'{split.name}/{name}' for split in splits[1:] for name in names}
  if task.baseline and metric not in known:
    raise ConfigError(f'evaluate.metric {metric!r} is not one of {", ".join(sorted(known))}')
  return TaskEvaluator(predictors(settings, build, task, splits, mesh))
