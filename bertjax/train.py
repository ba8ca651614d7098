"""The training loop, to be read from top to bottom.

  job -> state (resumed, from weights, or fresh) -> for every stage: the step, compiled once for
  each shape of its batches, and the loop: evaluate if due, save if due, fetch, step, push metrics

Everything random is a function of the seed and the step, so a run that was killed and resumed ends
with the same weights, bit for bit, as one that was not.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator

import jax
from absl import logging
from etils import epath
from flax import nnx

from bertjax import checkpoint, metrics, optim, sharding, state, stop
from bertjax import step as step_lib
from bertjax.alarms import NonFiniteError
from bertjax.config import ConfigError
from bertjax.data import loader
from bertjax.job import Evaluator, Job, Shapes, Stage


@dataclasses.dataclass(frozen=True)
class Run:
  """What the loop reads and writes."""

  job: Job
  graphdef: nnx.GraphDef
  shapes: state.Params
  stopping: stop.StopRequest
  checkpoints: checkpoint.Checkpoints
  writer: metrics.MetricsWriter
  evaluator: Evaluator | None


class End(enum.Enum):
  """Why the steps of a stage ended."""

  DONE = 'all steps were made'
  SIGNAL = 'asked to stop by a signal'
  JUDGED = 'the evaluations no longer get better'


def train(
    job: Job, workdir: epath.PathLike, stopping: stop.StopRequest | None = None
) -> int:
  """Trains until the last stage is done, or until asked to stop.

  Args:
    job: what is trained on what.
    workdir: receives checkpoints, metrics.jsonl and event files; resumed if it holds a checkpoint.
    stopping: the request that several runs in turn share, for one may come when a run no longer
      looks, at its end; None makes one.

  Returns:
    The exit code: 0 if training is complete, 143 if it was stopped by a signal after a save.

  Raises:
    ConfigError: the workdir was started with another configuration.
    CheckpointError: a checkpoint that cannot be written or read.
    NonFiniteError: a loss is NaN or infinite.
  """
  workdir = epath.Path(workdir)
  asked = contextlib.nullcontext(stopping) if stopping else stop.StopRequest()
  with asked as stopping, jax.set_mesh(job.mesh):
    graphdef, shapes = state.split(job.build)
    keep = job.checkpoint
    with checkpoint.Checkpoints(
        workdir, save_every=keep.every, keep_last=keep.keep_last, keep_every=keep.keep_every,
        metadata=job.metadata, tokenizer=job.tokenizer) as checkpoints:

      # --- State: own checkpoint, or given weights, or fresh ------------------------------------
      first = checkpoints.latest()
      _refuse_other_config(job, workdir, first)
      if first is not None and (first == job.num_steps or job.is_over(first)):
        _log(f'Training is complete: {workdir} holds step {first}, the last. Nothing to do')
        return 0
      # The structure of the optimizer's state is the same in every stage.
      optimizer = optim.make(job.stages[0].optimizer, shapes)
      like = state.abstract(shapes, optimizer, job.mesh)
      current, step, origin = _first_state(job, optimizer, like, checkpoints, first)
      evaluator = job.open_evaluator()
      checkpoints.claim()  # written to from here on; no checkpoint may come for an hour
      if first is None:
        job.forget()
      _log(_start_up_block(job, workdir, origin, like))

      with metrics.MetricsWriter(
          workdir, total_steps=job.num_steps, log_every=job.log_every, alarms=job.alarms,
          restored_step=step, baselines=job.baselines) as writer:
        run = Run(job, graphdef, shapes, stopping, checkpoints, writer, evaluator)

        # --- Stages -----------------------------------------------------------------------------
        end = End.DONE
        for number in range(job.stage_at(step), len(job.stages)):
          try:
            current, step, end = _train_stage(run, number, current, step)
          except NonFiniteError as error:
            checkpoints.discard(error.ruined_step)  # saved before anything was computed with it
            raise
          if end is not End.DONE:
            break
          if number + 1 < len(job.stages):  # the next one compiles for minutes before it can save
            checkpoints.save(step, current, job.position(step), force=True)
            if stopping.noticed:
              end = End.SIGNAL
              break
        if end is End.SIGNAL:
          checkpoints.wait()
          _log(f'Stopped before step {step} after a save; the same command goes on from here')
          return stop.SAVED

        # --- The end ----------------------------------------------------------------------------
        if end is End.DONE:
          _evaluate(run, current, step, to_the_end=True)
        checkpoints.save(step, current, job.position(step), force=True)
        checkpoints.wait()
      _log('\n'.join([f'Training is complete: {step:,} steps. Next:', *job.farewell(workdir)]))
      return 0


def _train_stage(
    run: Run, number: int, current: state.TrainState, first: int
) -> tuple[state.TrainState, int, End]:
  """The loop over the steps of one stage, from step `first` of the run; why it ended comes last."""
  job, writer = run.job, run.writer
  stage, start = job.stages[number], job.starts()[number]
  end = start + stage.num_steps

  # --- Input: the first batch is made, and TensorFlow loaded, while the step compiles -----------
  stream = stage.open()
  batches = loader.device_batches(
      _begun(lambda: stream.batches(first - start, end - first)), job.mesh)

  # --- The step, compiled once for each shape of batches ----------------------------------------
  optimizer = optim.make(stage.optimizer, run.shapes)
  like = state.abstract(run.shapes, optimizer, job.mesh)
  compiled = _compile(run, stage, like, optimizer, stream.shapes)
  seed = step_lib.seed_word(job.seed)
  job.alarms.warmup_steps = stage.warmup_end
  if first == start and number > 0:
    current = _begin_stage(stage, current, like)
  writer.start_phase(stage.batch_size * stream.examples_per_row,
                     stage.flops_per_row(stream.mean_length) / stream.examples_per_row)
  writer.write('data', first, stream.statistics)  # the realised rate of pairs, of padding, ...

  # --- The loop. The order is a contract: evaluate, save, fetch, step, push ---------------------
  for step in range(first, end):
    if _is_due(job.evaluate_every, step) and _evaluate(run, current, step):
      _log(f'Stopped early, before step {step}: {End.JUDGED.value}')
      return current, step, End.JUDGED
    stopping = run.stopping.due(step)
    if stopping or _is_due(job.checkpoint.every, step):
      writer.wait()  # raises if the last step was not finite: a ruined state is never saved
      with writer.timer.excluded():
        run.checkpoints.save(step, current, job.position(step), force=stopping)
    if stopping:
      return current, step, End.SIGNAL
    with writer.timer.waiting_for_data():
      batch = next(batches)
    current, step_metrics = compiled[batch['input_ids'].shape](current, batch, seed)
    writer.push(step + 1, step_metrics)
  writer.wait()
  return current, end, End.DONE


def _is_due(every: int, step: int) -> bool:
  return bool(every and step and step % every == 0)


def _compile(
    run: Run, stage: Stage, like: state.TrainState, optimizer, shapes: tuple[Shapes, ...]
) -> dict[tuple[int, ...], Callable]:
  """The compiled step for each shape of input_ids."""
  _log('Compiling the step for batches of '
       + ', '.join(' x '.join(map(str, batch['input_ids'][0])) for batch in shapes))
  train_step = step_lib.jit_train_step(
      step_lib.TrainStep(run.graphdef, stage.objective, optimizer, stage.optimizer,
                         stage.accumulate), like)
  return {batch['input_ids'][0]:
          train_step.lower(like, loader.global_shapes(batch, run.job.mesh),
                           step_lib.seed_word(run.job.seed)).compile()
          for batch in shapes}


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
) -> bool:
  """Writes the scores of the model; returns whether they say that training is over.

  A request to stop cuts the evaluation short, but for the last one of the run.
  """
  if run.evaluator is None:
    return False
  run.writer.wait()
  with run.writer.timer.excluded():
    scores = run.evaluator.run(
        current.params, lambda: run.stopping.noticed and not to_the_end)
    if scores is None:
      return False
    run.writer.write_evaluation(run.evaluator.split, step, scores)
    return run.job.judge(step, current.params, scores)


def _begin_stage(stage: Stage, current, like) -> state.TrainState:
  """Applies what a stage starts anew; done twice (a resume at this step) it changes nothing."""
  restart = jax.jit(
      lambda opt_state: optim.restart(
          opt_state, moments=stage.restart_moments, schedule=stage.restart_schedule),
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.opt_state))
  return dataclasses.replace(current, opt_state=restart(current.opt_state))


# --- Before the first step ---------------------------------------------------------------------


def _refuse_other_config(job: Job, workdir: epath.Path, step: int | None) -> None:
  """Raises ConfigError if the workdir was started with what would give other weights."""
  if step is None:
    return
  stored = checkpoint.read_metadata(workdir, step)
  if 'imported_from' in stored:
    raise ConfigError(f'{workdir} is an imported checkpoint: take a new --workdir, with '
                      f'--config.init_from={workdir}')
  kind, own = (metadata.get('head', {}).get('kind', 'pretraining')
               for metadata in (stored, job.metadata))
  if kind != own:
    raise ConfigError(f'{workdir} holds a run of another kind ({kind}, this is {own}): take a new '
                      '--workdir')
  try:
    wrong = job.differences(stored['config'], step)
  except ConfigError as error:
    raise ConfigError(f'{workdir}: this version cannot read the configuration that it was started '
                      f'with ({error}); take a new --workdir') from error
  if stored['data_hash'] != job.metadata['data_hash']:
    wrong.append(
        f'data: stored {stored["data_hash"][:12]}, now {job.metadata["data_hash"][:12]}')
  if wrong:
    lines = '\n  '.join(wrong)
    raise ConfigError(
        f'{workdir} was started with another configuration:\n  {lines}\nTake a new --workdir (with '
        f'--config.init_from={workdir} to begin from its weights), or set these back.')


def _first_state(
    job: Job, optimizer, like: state.TrainState, checkpoints: checkpoint.Checkpoints,
    step: int | None,
) -> tuple[state.TrainState, int, str]:
  """The state to begin with, its step, and in words where it comes from.

  The step may be older than the one asked for, if that turns out not to be readable.
  """
  if step is not None:
    current, position = checkpoints.restore(like)
    step = int(current.step)
    return current, step, f'resumed at step {step} of this workdir (data position {position})'
  if job.initial is not None:
    params, origin = job.initial()
    return state.from_params(params, optimizer, like), 0, origin
  return state.create(job.build, job.seed, optimizer, like), 0, 'from scratch'


def _start_up_block(
    job: Job, workdir: epath.Path, origin: str, like: state.TrainState
) -> str:
  """Everything that was chosen, once, before the first step."""
  devices = jax.devices()
  return '\n'.join([
      f'bertjax {job.title}',
      f'  workdir     {workdir}',
      f'  start       {origin}',
      f'  devices     {len(devices)} x {devices[0].device_kind} in {jax.process_count()} '
      f'process(es), mesh {dict(job.mesh.shape)}',
      f'  state       {_size(like.params)} of parameters and {_size(like.opt_state)} of the '
      'optimizer a device',
      *(f'  {line}' for line in job.describe()),
  ])


def _size(tree) -> str:
  return f'{sharding.bytes_per_device(tree) / 2**20:,.1f} MiB'


def _log(text: str) -> None:
  if jax.process_index() == 0:
    logging.info('%s', text)
