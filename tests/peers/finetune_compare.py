"""Fine-tunes with bertjax and with the peer in turn, the same recipe on the same core; by hand.

    python tests/peers/finetune_sets.py DATA
    python tests/peers/finetune_compare.py run --weights HF_DIR --data DATA --work WORK \
        --peer_python PYTHON --tasks sst2 cola --seeds 0 1 2 3 4
    python tests/peers/finetune_compare.py table WORK

PYTHON has the extra `parity` (finetune_peer.py); this runs where bertjax is. `run` appends a line
for each run to WORK/results.jsonl and passes over those that it has; logs are in WORK/logs. Speed
is sequences per second of CPU time of the training steps, compilation left out: on a machine that
others use as well, the wall clock says little.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import runpy
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SHARED = pathlib.Path(os.environ.get('BERTJAX_SHARED', '../shared')) / 'data'


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Of one task. Ours chooses lengths of rows; the peer pads each batch to its longest example."""

  entry: str  # module of bertjax.finetune, its configuration
  config: str
  files: tuple[str, ...]  # --config.data.* of ours; {data} and {shared} are filled in
  seq_length: int = 128
  rows: int = 0  # of the training file; 0: all
  epochs: int = 3
  batch_size: int = 32
  lr: float = 1e-4  # a small model: BERT-base's 2e-5 is too low for it


def _glue(task: str, rows: int) -> Recipe:
  files = ('path={shared}/glue_data', f'max_train_rows={rows}')
  return Recipe('glue', f'glue.py:task={task}', files, rows=rows)


def _squad(version: int) -> Recipe:
  files = tuple(f'{part}={{data}}/squad{version}-{part}.json' for part in ('train', 'dev'))
  return Recipe('squad', f'squad.py:version={version}', files, 384, epochs=2, batch_size=8)


RECIPES = {
    'sst2': _glue('sst2', 2000),
    'cola': _glue('cola', 2000),
    'stsb': _glue('stsb', 2000),
    'rte': _glue('rte', 2000),
    'wnut17': Recipe(
        'tagging', 'tagging.py',
        ('train={data}/wnut17-train.conll', 'dev={shared}/ner/wnut17/emerging.dev.conll'),
        batch_size=16),
    'hellaswag': Recipe(
        'swag', 'swag.py', ('train={data}/hellaswag-train.jsonl', 'dev={data}/hellaswag-dev.jsonl'),
        epochs=2, batch_size=16),
    'squad': _squad(1),
    'squad2': _squad(2),
}


# --- Commands -----------------------------------------------------------------------------------


def ours(args: argparse.Namespace, task: str, seed: int) -> list[str]:
  """The command line of bertjax."""
  recipe = RECIPES[task]
  options = {
      'init_from': args.work / 'init', 'seed': seed, 'seq_length': recipe.seq_length,
      'num_epochs': recipe.epochs, 'batch_size': recipe.batch_size,
      'optimizer.learning_rate': recipe.lr,
      # Only at the end: the peer saves nothing, and this is written while steps are timed.
      'checkpoint.every': 10**6,
  }
  files = [file.format(data=args.data, shared=SHARED) for file in recipe.files]
  return [sys.executable, __file__, 'timed', recipe.entry,
          f'--config=configs/finetune/{recipe.config}',
          *(f'--config.{name}={value}' for name, value in options.items()),
          *(f'--config.data.{file}' for file in files),
          f'--workdir={args.work / "ours" / task / str(seed)}']


def peer(args: argparse.Namespace, task: str, seed: int) -> list[str]:
  """The command line of Transformers."""
  recipe = RECIPES[task]
  options = {'task': task, 'seed': seed, 'weights': args.weights, 'data': args.data,
             'rows': recipe.rows, 'epochs': recipe.epochs, 'batch_size': recipe.batch_size,
             'lr': recipe.lr, 'max_length': recipe.seq_length}
  return [args.peer_python, str(HERE / 'finetune_peer.py'),
          *(part for name, value in options.items() for part in (f'--{name}', str(value)))]


# --- Our run, timed -----------------------------------------------------------------------------


def run_timed(entry: str, rest: list[str]) -> None:
  """`python -m bertjax.finetune.ENTRY rest`, whose steps are timed by CPU time as well."""
  from bertjax import host_memory

  host_memory.keep_freed_memory()  # as the command does, before anything imports JAX
  from bertjax import metrics

  total = {'steps': 0, 'cpu_seconds': 0.0}

  class CpuTimer(metrics.StepTimer):
    """By CPU time of the process: what metrics.jsonl has is then by CPU time too."""

    def __init__(self):
      super().__init__(time.process_time)

    def window(self):
      steps = self._window_steps
      found = super().window()
      if found is not None:
        total['steps'] += steps
        total['cpu_seconds'] += steps * found[0]
      return found

  metrics.StepTimer = CpuTimer
  workdir = next(a.partition('=')[2] for a in rest if a.startswith('--workdir='))
  sys.argv = [entry, *rest]
  with contextlib.suppress(SystemExit):
    runpy.run_module(f'bertjax.finetune.{entry}', run_name='__main__')
  (pathlib.Path(workdir) / 'speed.json').write_text(json.dumps(total), encoding='utf-8')


def our_result(workdir: pathlib.Path, recipe: Recipe) -> dict:
  """What the peer's line has, out of the files of the run."""
  [best] = json.loads((workdir / 'results.json').read_text(encoding='utf-8'))
  lines = [json.loads(line) for line in
           (workdir / 'metrics.jsonl').read_text(encoding='utf-8').split('\n') if line]
  data = next(line for line in lines if line['split'] == 'data')
  speed = json.loads((workdir / 'speed.json').read_text(encoding='utf-8'))
  # Fillers in the last batch of an epoch are no examples.
  per_step = data['examples'] / math.ceil(data['examples'] / recipe.batch_size)
  return {'metric': best['metric'], 'baseline': best['baseline'], 'score': best['score'],
          'best_scores': best['scores'], 'padding': data['padding'],
          'sequences_per_cpu_second': per_step * speed['steps'] / speed['cpu_seconds']}


# --- All of them --------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
  """Every task and seed: ours, then the peer's."""
  args.work = args.work.resolve()
  (args.work / 'logs').mkdir(parents=True, exist_ok=True)
  if not (args.work / 'init').exists():
    subprocess.run([sys.executable, '-m', 'bertjax.convert.import_checkpoint', '--from',
                    f'hf:{args.weights}', '--output', str(args.work / 'init')], check=True)
  done = {(r['framework'], r['task'], r['seed']) for r in read_results(args.work)}
  for task in args.tasks:
    for seed in args.seeds:
      for framework in ('ours', 'peer'):
        if (framework, task, seed) in done:
          continue
        record = {'framework': framework, 'task': task, 'seed': seed}
        record |= one_run(args, framework, task, seed)
        with (args.work / 'results.jsonl').open('a', encoding='utf-8') as file:
          file.write(json.dumps(record) + '\n')


def one_run(args: argparse.Namespace, framework: str, task: str, seed: int) -> dict:
  """Runs one of them on one core; returns its figures."""
  command = {'ours': ours, 'peer': peer}[framework](args, task, seed)
  workdir = args.work / 'ours' / task / str(seed)
  if framework == 'ours':
    shutil.rmtree(workdir, ignore_errors=True)
  environment = os.environ | {
      'PYTHONPATH': str(HERE.parent.parent), 'OMP_NUM_THREADS': '1',
      'TOKENIZERS_PARALLELISM': 'false', 'JAX_PLATFORMS': 'cpu'}
  log = args.work / f'logs/{framework}-{task}-{seed}.log'
  with log.open('w', encoding='utf-8') as output:
    done = subprocess.run(['taskset', '-c', str(args.core), *command], env=environment,
                          stdout=subprocess.PIPE, stderr=output, text=True)
    output.write(done.stdout)
  if done.returncode:
    sys.exit(f'{framework}, {task}, seed {seed}: exit code {done.returncode}; see {log}')
  if framework == 'peer':
    return json.loads(done.stdout.strip().split('\n')[-1])
  shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)
  return our_result(workdir, RECIPES[task])


def read_results(work: pathlib.Path) -> list[dict]:
  """The lines so far."""
  path = work / 'results.jsonl'
  lines = path.read_text(encoding='utf-8').split('\n') if path.exists() else []
  return [json.loads(line) for line in lines if line]


def table(work: pathlib.Path) -> str:
  """A Markdown table: medians, the peer's standard deviation and the ratio of speeds."""
  records = [r for r in read_results(work) if r['task'] in RECIPES]
  rows = ['| task, metric | seeds | bertjax | peer | baseline | speed |', '|' + 6 * '---|']
  for task in dict.fromkeys(r['task'] for r in records):
    mine, theirs = ([r for r in records if (r['framework'], r['task']) == (name, task)]
                    for name in ('ours', 'peer'))
    if not mine or not theirs:
      continue
    score = lambda found: f'{statistics.median(r["score"] for r in found):.3f}'
    spread = statistics.stdev(r['score'] for r in theirs) if len(theirs) > 1 else math.nan
    speed = lambda found: statistics.median(r['sequences_per_cpu_second'] for r in found)
    baseline = mine[0]['baseline']  # of equal predictions a correlation is undefined
    rows.append(
        f'| {task}, {mine[0]["metric"]} | {len(mine)}, {len(theirs)} | {score(mine)} | '
        f'{score(theirs)} ± {spread:.3f} | {"none" if baseline is None else f"{baseline:.3f}"} | '
        f'{speed(mine) / speed(theirs):.2f} |')
  return '\n'.join(rows)


def main():
  if sys.argv[1:2] == ['timed']:  # everything after it is for bertjax
    run_timed(sys.argv[2], sys.argv[3:])
    return
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(required=True)
  command = commands.add_parser('run')
  command.set_defaults(main=run)
  command.add_argument('--weights', required=True, help='a Hugging Face directory')
  command.add_argument('--data', type=pathlib.Path, required=True, help='from finetune_sets.py')
  command.add_argument('--work', type=pathlib.Path, required=True)
  command.add_argument('--peer_python', default=sys.executable)
  command.add_argument('--tasks', nargs='+', choices=RECIPES, default=list(RECIPES))
  command.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2, 3, 4])
  command.add_argument('--core', type=int, default=0)
  command = commands.add_parser('table')
  command.set_defaults(main=lambda args: print(table(args.work)))
  command.add_argument('work', type=pathlib.Path)
  args = parser.parse_args()
  args.main(args)


if __name__ == '__main__':
  main()
