"""The training loop, to be read from top to bottom.

  settings -> data -> model -> state (resumed, from weights, or fresh) -> for every phase: one step,
  compiled once, and the loop: evaluate if due, save if due, next batch, step, push metrics

Everything random is a function of the seed and the step, so a run that was killed and resumed ends
with the same weights, bit for bit, as one that was not.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator

import jax
import ml_collections
from absl import logging
from etils import epath

from bertjax import (
    checkpoint,
    heads,
    metrics,
    objectives,
    optim,
    sharding,
    startup,
    state,
    stop,
)
from bertjax import settings as settings_lib
from bertjax import step as step_lib
from bertjax.alarms import Alarms, NonFiniteError
from bertjax.data import loader, prepare, pretrain
from bertjax.data.build import BuildError
from bertjax.data.corpus import CorpusError
from bertjax.data.encoding import TokenizerError
from bertjax.data.sampling import SamplingError
from bertjax.data.shards import ShardError
from bertjax.evals.pretraining import Evaluator
from bertjax.settings import ConfigError, Settings

# What a user can cause and mend: told in words, without a trace.
EXPECTED_ERRORS = (
    ConfigError, sharding.MeshError, prepare.DataError, ShardError, SamplingError, TokenizerError,
    CorpusError, BuildError, checkpoint.CheckpointError, NonFiniteError)


@dataclasses.dataclass(frozen=True)
class Run:
  """What the loop reads and writes."""

  setup: startup.Setup
  stopping: stop.StopRequest
  checkpoints: checkpoint.Checkpoints
  writer: metrics.MetricsWriter
  evaluator: Evaluator | None
  alarms: Alarms


def train(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Trains until the last phase is done, or until asked to stop.

  Args:
    config: as configs/*.py; see bertjax.settings.Settings.
    workdir: receives checkpoints, metrics.jsonl and event files; resumed if it holds a checkpoint.

  Returns:
    The exit code: 0 if training is complete, 143 if it was stopped by a signal after a save.

  Raises:
    One of EXPECTED_ERRORS, in words.
  """
  # --- Settings: all of them are checked before anything is built -------------------------------
  settings = settings_lib.from_config(config)
  workdir = epath.Path(workdir)
  mesh = sharding.make_mesh(settings.mesh)
  settings_lib.check_batches(
      settings, mesh.shape['data'] * mesh.shape['fsdp'], jax.process_count())

  # --- Data. Until it is there a signal ends the process at once: a build goes on where it was --
  paths = startup.data_paths(settings, workdir)
  corpora = prepare.open_corpora(paths)

  with stop.StopRequest() as stopping, jax.set_mesh(mesh):
    bert = settings.bert_config(corpora.tokenizer.vocab_size)

    # --- Model ----------------------------------------------------------------------------------
    build = lambda rngs: heads.BertForPreTraining(bert, rngs)
    graphdef, shapes = state.split(build)

    # --- Checkpoints and logs -------------------------------------------------------------------
    resolved = settings_lib.to_json(settings) | {'model': dataclasses.asdict(bert)}
    metadata = {'config': resolved, 'data_hash': corpora.content_hash,
                'tokenizer_hash': corpora.tokenizer.hash()}
    keep = settings.checkpoint
    with checkpoint.Checkpoints(
        workdir, save_every=keep.every, keep_last=keep.keep_last, keep_every=keep.keep_every,
        metadata=metadata, tokenizer=corpora.tokenizer_folder) as checkpoints:
      first = checkpoints.latest()
      startup.refuse_other_config(workdir, first, metadata)
      if first == settings.num_steps:
        _log(f'Training is complete: {workdir} holds step {first}, the last. Nothing to do')
        return 0

      # --- State: own checkpoint, or given weights, or fresh ------------------------------------
      setup = startup.Setup(settings, corpora, mesh, build, graphdef, shapes)
      current, step, origin = startup.first_state(setup, checkpoints, first)
      phase = settings.phase_at(step)
      evaluator = startup.evaluator(setup)
      _log(startup.start_up_block(setup, bert, workdir, origin))

      alarms = startup.alarms(setup)
      with metrics.MetricsWriter(
          workdir, total_steps=settings.num_steps, log_every=settings.log_every,
          alarms=alarms,
          restored_step=step, baselines={'unigram_entropy': corpora.unigram_entropy}) as writer:
        run = Run(setup, stopping, checkpoints, writer, evaluator, alarms)

        # --- Phases -----------------------------------------------------------------------------
        for number in range(phase, len(settings.phases)):
          try:
            current, step, stopped = _train_phase(run, number, current, step)
          except NonFiniteError as error:
            checkpoints.discard(error.ruined_step)  # saved before anything was computed with it
            raise
          if stopped:
            return stop.SAVED

        # --- The end ----------------------------------------------------------------------------
        _evaluate(run, current, step, to_the_end=True)
        checkpoints.save(step, current, _position(settings, step), force=True)
        checkpoints.wait()
      _log(startup.farewell(workdir, step))
      return 0


def _train_phase(
    run: Run, phase: int, current: state.TrainState, first: int
) -> tuple[state.TrainState, int, bool]:
  """The loop over the steps of one phase, from step `first` of the run.

  Returns:
    The state, its step, and whether a signal ended the run before the phase was done.
  """
  setup, writer, settings = run.setup, run.writer, run.setup.settings
  here, start = settings.phases[phase], settings.starts()[phase]
  end = start + here.num_steps

  # --- Input: the first batch is made, and TensorFlow loaded, while the step compiles -----------
  stream = startup.stream(setup, phase)
  batches = loader.device_batches(_begun(lambda: pretrain.batches(
      stream, here.batch_size, first - start, end - first, jax.process_index(),
      jax.process_count())), setup.mesh)

  # --- The step, compiled once for the phase ----------------------------------------------------
  optimizer_settings = settings.optimizer_of(phase)
  optimizer = optim.make(optimizer_settings, setup.shapes)
  like = state.abstract(setup.shapes, optimizer, setup.mesh)
  train_step = step_lib.jit_train_step(
      step_lib.TrainStep(setup.graphdef, objectives.PRETRAINING, optimizer, optimizer_settings,
                         settings.seed, here.accumulate), like)
  shapes = loader.global_shapes(pretrain.batch_shapes(stream.settings, here.batch_size), setup.mesh)
  compiled = train_step.lower(like, shapes).compile()
  run.alarms.warmup_steps = startup.warmup_end(settings, phase)
  if first == start and phase > 0:
    current = _begin_phase(here, current, like)
  writer.start_phase(here.batch_size, _flops_per_example(setup, phase))
  writer.write('data', first, dataclasses.asdict(stream.statistics))  # realised rate of pairs, ...

  # --- The loop. The order is a contract: evaluate, save, fetch, step, push ---------------------
  for step in range(first, end):
    if _is_due(settings.heldout.every, step):
      _evaluate(run, current, step)
    stopping = run.stopping.due(step)
    if stopping or _is_due(settings.checkpoint.every, step):
      writer.wait()  # raises if the last step was not finite: a ruined state is never saved
      with writer.timer.excluded():
        run.checkpoints.save(step, current, _position(settings, step), force=stopping)
    if stopping:
      run.checkpoints.wait()
      _log(f'Stopped before step {step} after a save; the same command goes on from here')
      return current, step, True
    with writer.timer.waiting_for_data():
      batch = next(batches)
    current, step_metrics = compiled(current, batch)
    writer.push(step + 1, step_metrics)
  writer.wait()
  return current, end, False


def _is_due(every: int, step: int) -> bool:
  return bool(every and step and step % every == 0)


def _begun(make: Callable[[], Iterator]) -> Iterator:
  """The batches of `make()`; pipeline and first batch are made in the background from now on."""
  def begin():
    batches = make()
    return next(batches), batches

  pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='first-batch')
  begun = pool.submit(begin)
  pool.shutdown(wait=False)

  def joined():
    first, batches = begun.result()
    yield first
    yield from batches

  return joined()


def _evaluate(
    run: Run, current: state.TrainState, step: int, to_the_end: bool = False
) -> None:
  """Writes the quality on the held-out split; a request to stop cuts it short, but for the last."""
  if run.evaluator is None:
    return
  run.writer.wait()
  with run.writer.timer.excluded():
    sums = run.evaluator.run(
        current.params, lambda: run.stopping.noticed and not to_the_end)
    if sums is not None:
      run.writer.write_heldout(step, sums)


def _begin_phase(here: settings_lib.Phase, current, like) -> state.TrainState:
  """Applies what a phase starts anew; done twice (a resume at this step) it changes nothing."""
  restart = jax.jit(
      lambda opt_state: optim.restart(
          opt_state, moments=here.restart_moments, schedule=here.learning_rate > 0),
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.opt_state))
  return dataclasses.replace(current, opt_state=restart(current.opt_state))


def _position(settings: Settings, step: int) -> dict[str, int]:
  """Where in the data a step stands: all that a resume needs."""
  phase = settings.phase_at(step)
  starts = settings.starts()
  seen = sum(p.batch_size * min(p.num_steps, max(0, step - start))
             for p, start in zip(settings.phases, starts, strict=True))
  return {'phase': phase, 'step_in_phase': step - starts[phase], 'examples_seen': seen}


def _flops_per_example(setup: startup.Setup, phase: int) -> float:
  bert = setup.settings.bert_config(setup.corpora.tokenizer.vocab_size)
  examples = setup.settings.pretrain_settings(phase)
  return metrics.model_flops_per_example(
      hidden_size=bert.hidden_size, num_hidden_layers=bert.num_hidden_layers,
      intermediate_size=bert.intermediate_size, vocab_size=bert.vocab_size,
      seq_length=examples.seq_length, num_predictions=examples.num_predictions)


def _log(text: str) -> None:
  if jax.process_index() == 0:
    logging.info('%s', text)
