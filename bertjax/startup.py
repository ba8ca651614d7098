"""What happens before the first step: data opened, state found, everything that was chosen said."""

import dataclasses
from collections.abc import Callable

import jax
from absl import logging
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from bertjax import checkpoint, model, objectives, optim, state
from bertjax import settings as settings_lib
from bertjax.alarms import Alarms
from bertjax.data import prepare, pretrain, shards
from bertjax.data.encoding import Tokenizer
from bertjax.data.sampling import SamplingError
from bertjax.evals.pretraining import Evaluator
from bertjax.settings import ConfigError, Settings


@dataclasses.dataclass(frozen=True)
class Setup:
  """What is trained, on what."""

  settings: Settings
  corpora: prepare.Corpora
  mesh: Mesh
  build: Callable[[nnx.Rngs], nnx.Module]
  graphdef: nnx.GraphDef
  shapes: state.Params


def data_paths(settings: Settings, workdir: epath.Path) -> tuple[str, ...]:
  data = settings.data
  if data.paths:
    return data.paths
  return (prepare.build_from_text(
      workdir, inputs=data.input, format=data.format, language=data.language,
      tokenizer_type=data.tokenizer_type, vocab_size=data.vocab_size, heldout=data.heldout,
      num_workers=data.num_workers, process_index=jax.process_index(),
      process_count=jax.process_count(), barrier=multihost_utils.sync_global_devices),)


def stream(setup: Setup, phase: int) -> pretrain.ExampleStream:
  data = setup.settings.data
  return pretrain.ExampleStream(
      setup.corpora.train, setup.corpora.tokenizer, setup.settings.pretrain_settings(phase),
      weights=data.weights or None, sampling_exponent=data.sampling_exponent)


def evaluator(setup: Setup) -> Evaluator | None:
  """Over the held-out split, in examples of the first phase; None if nothing is held out."""
  settings, corpora = setup.settings, setup.corpora
  if not corpora.heldout:
    logging.warning('No held-out documents: nothing will be evaluated')
    return None
  return evaluator_on(
      corpora.heldout, corpora.tokenizer, settings, setup.graphdef, objectives.PRETRAINING,
      setup.mesh, batch_size=settings.heldout.batch_size or settings.phases[0].batch_size,
      max_examples=settings.heldout.max_examples)


def evaluator_on(
    splits: tuple[shards.Split, ...], tokenizer: Tokenizer, settings: Settings,
    graphdef: nnx.GraphDef, objective: objectives.Objective, mesh: Mesh, *, batch_size: int,
    max_examples: int | None, seq_length: int | None = None,
) -> Evaluator:
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
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  rows = -(-batch_size // ways) * ways
  batches = pretrain.heldout_batches(stream, rows, jax.process_index(), jax.process_count())
  return Evaluator(graphdef, objective, batches, mesh, stream.num_examples)


def alarms(setup: Setup) -> Alarms:
  """Judges a fifth of the run at a time: 100 steps at least, 2,000 at most."""
  return Alarms(setup.corpora.unigram_entropy,
                window_steps=max(100, min(2000, setup.settings.num_steps // 5)))


def warmup_end(settings: Settings, phase: int) -> int:
  """The step of the run at which the warm-up of the phase's schedule is over."""
  begins = max(i for i in range(phase + 1) if settings.phases[i].learning_rate or i == 0)
  return settings.starts()[begins] + settings.optimizer_of(phase).warmup_steps


def refuse_other_config(workdir: epath.Path, step: int | None, metadata: dict) -> None:
  """Raises ConfigError if the workdir was started with what would give other weights."""
  if step is None:
    return
  stored = checkpoint.read_metadata(workdir, step)
  wrong = settings_lib.differences(stored['config'], metadata['config'], step)
  if stored['data_hash'] != metadata['data_hash']:
    wrong.append(f'data: stored {stored["data_hash"][:12]}, now {metadata["data_hash"][:12]}')
  if wrong:
    lines = '\n  '.join(wrong)
    raise ConfigError(
        f'{workdir} was started with another configuration:\n  {lines}\nTake a new --workdir (with '
        f'--config.init_from={workdir} to begin from its weights), or set these back.')


def first_state(
    setup: Setup, checkpoints: checkpoint.Checkpoints, step: int | None
) -> tuple[state.TrainState, int, str]:
  """The state to begin with, its step, and in words where it comes from.

  The step may be older than the one asked for, if that turns out not to be readable.
  """
  settings = setup.settings
  # The structure of the optimizer's state is the same in every phase.
  optimizer = optim.make(settings.optimizer_of(0), setup.shapes)
  like = state.abstract(setup.shapes, optimizer, setup.mesh)
  if step is not None:
    current, position = checkpoints.restore(like)
    step = int(current.step)
    return current, step, f'resumed at step {step} of this workdir (data position {position})'
  if settings.init_from:
    stored = checkpoint.read_metadata(settings.init_from)
    wanted = setup.corpora.tokenizer.hash()
    if stored['tokenizer_hash'] != wanted:
      raise ConfigError(f'init_from {settings.init_from} was trained with another tokenizer than '
                        'the shards; build the shards with the tokenizer in its checkpoint')
    params = checkpoint.restore_params(settings.init_from, abstract=setup.shapes)
    current = state.from_params(params, optimizer, like)
    return current, 0, f'weights of {settings.init_from} (step {stored["step"]}), a new schedule'
  return state.create(setup.build, settings.seed, optimizer, like), 0, 'from scratch'


# --- What the user sees ------------------------------------------------------------------------


def start_up_block(setup: Setup, bert: model.BertConfig, workdir: epath.Path, origin: str) -> str:
  """Everything that was chosen, once, before the first step."""
  settings, corpora = setup.settings, setup.corpora
  devices = jax.devices()
  tokens = sum(split.num_tokens for split in corpora.train)
  documents = sum(split.num_documents for split in corpora.train)
  lines = [
      'bertjax pre-training',
      f'  workdir     {workdir}',
      f'  start       {origin}',
      f'  devices     {len(devices)} x {devices[0].device_kind} in {jax.process_count()} '
      f'process(es), mesh {dict(setup.mesh.shape)}',
      f'  model       {bert.num_hidden_layers} layers, {bert.hidden_size} wide, '
      f'{bert.num_attention_heads} heads; {state.count_parameters(setup.shapes):,} parameters, '
      f'computing in {bert.dtype}, dropout {bert.hidden_dropout_prob}',
      f'  vocabulary  {bert.vocab_size:,} (padded to {bert.padded_vocab_size:,}), '
      f'{corpora.tokenizer.type}',
      f'  data        {documents:,} documents, {tokens:,} tokens, hash '
      f'{corpora.content_hash[:12]}, unigram entropy {corpora.unigram_entropy:.3f} nats',
      f'  task        masked_lm, next_sentence={settings.data.next_sentence}, whole words: '
      f'{settings.data.whole_word_masking}',
  ]
  for i, phase in enumerate(settings.phases):
    rate = settings.optimizer_of(i)
    lines.append(
        f'  phase {i}     {phase.num_steps:,} steps of {phase.batch_size} x {phase.seq_length} '
        f'({phase.batch_size * phase.seq_length:,} tokens a step, accumulated over '
        f'{phase.accumulate}); rate {rate.learning_rate:g}, warm-up {rate.warmup_steps:,} of '
        f'{rate.num_steps:,}')
  lines.append(f'  steps       {settings.num_steps:,} in all; bias correction: '
               f'{settings.optimizer_of(0).bias_correction}')
  return '\n'.join(lines)


def farewell(workdir: epath.Path, step: int) -> str:
  return '\n'.join([
      f'Training is complete: {step:,} steps. Next:',
      f'  python -m bertjax.tools.plot {workdir}',
      f"  python -m bertjax.tools.fill_mask --checkpoint {workdir} 'Returns the [MASK] value.'",
      f'  python -m bertjax.tools.inspect --checkpoint {workdir}',
  ])
