"""What devices and processes cost: the train step on virtual CPU devices that share these cores.

  python -m bertjax.tools.scaling --config=configs/tiny.py --batch_size=16 --seq_length=64

Each number of devices and of processes is a run of bertjax.tools.bench of its own, with the same
global batch and with a batch that grows with the devices. There is no more to compute with, so the
work takes the same time at best: the table shows overhead and never speed. What is not an option
here is handed to bench, e.g. `--config.mesh.fsdp=2`.

Exit codes: 0; 2 a run failed, with what it said.
"""

import argparse
import concurrent.futures
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_NOTE = ('All devices share the same cores, so no run can be faster than one device: this shows '
         'overhead, not speed. At best, every ratio is 1.')


class ScalingError(ValueError):
  """A run that failed, or cannot be; the message says what it said."""


def runs(devices: Sequence[int], processes: Sequence[int], batch: int) -> list[dict[str, Any]]:
  """What is to be run: one device first, then every number of devices in every number of processes.

  Args:
    devices: of the whole run.
    processes: which share the devices evenly; a number that does not divide them is left out.
    batch: rows of one device, and of all where the global batch is the same.

  Raises:
    ScalingError: a batch that most devices cannot share.
  """
  if batch % max(devices):
    raise ScalingError(f'--batch_size={batch} is not divisible by {max(devices)} devices; try '
                       f'{-(-batch // max(devices)) * max(devices)}')
  made = [{'processes': 1, 'devices': 1, 'scaling': 'same', 'batch_size': batch}]
  for scaling in ('same', 'weak'):
    for number in processes:
      made += [{'processes': number, 'devices': count, 'scaling': scaling,
                'batch_size': batch if scaling == 'same' else batch * count}
               for count in devices if count > 1 and count % number == 0]
  return made


def run_bench(asked: Mapping[str, Any], more: Sequence[str]) -> dict[str, Any]:
  """Runs bench in processes of its own; its figures.

  Raises:
    ScalingError: it failed.
  """
  count = asked['processes']
  flags = [flag for flag in os.environ.get('XLA_FLAGS', '').split() if 'device_count' not in flag]
  flags.append(f'--xla_force_host_platform_device_count={asked["devices"] // count}')
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(flags)}
  command = [sys.executable, '-m', 'bertjax.tools.bench', '--json',
             f'--batch_size={asked["batch_size"]}', *more]
  address = f'localhost:{_free_port()}'
  started = []
  for number in range(count):
    party = [f'--coordinator_address={address}', f'--num_processes={count}',
             f'--process_id={number}'] if count > 1 else []
    started.append(subprocess.Popen([*command, *party], env=environment, encoding='utf-8',
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE))
  with concurrent.futures.ThreadPoolExecutor(count) as pool:  # at once: a full pipe stops one
    said = list(pool.map(subprocess.Popen.communicate, started))
  for process, (_, errors) in zip(started, said, strict=True):
    if process.returncode:
      lines = errors.strip().splitlines() or [f'exit code {process.returncode}']
      raise ScalingError(f'{asked["processes"]} process(es), {asked["devices"]} device(s): '
                         + '\n'.join(lines[-3:]))
  return json.loads(said[0][0].splitlines()[-1])


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


def figures(asked: Mapping[str, Any], result: Mapping[str, Any], first_ms: float) -> dict[str, Any]:
  """A row of the table.

  Args:
    asked: of `runs`.
    result: of `run_bench`.
    first_ms: a step of the first run, on one device.
  """
  (report,) = result['variants']
  median = report['step_ms']['median']
  work = asked['devices'] if asked['scaling'] == 'weak' else 1
  return {**asked, 'step_ms': median, 'ratio': median / (first_ms * work),
          'real_tokens_per_second': report['real_tokens_per_second'],
          'compile_s': report['first_step_seconds']['compile'],
          'found_devices': result['devices'], 'found_processes': result['processes'],
          'loss': report['loss']}


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
  """The table."""
  lines = [_NOTE, '', 'batch  processes  devices  rows  step (ms)  time for the same work'
           '  real tokens/s  compile (s)']
  for row in rows:
    lines.append(
        f'{row["scaling"]:5}  {row["processes"]:9}  {row["devices"]:7}  {row["batch_size"]:4}  '
        f'{row["step_ms"]:9.1f}  {row["ratio"]:21.2f}x  {row["real_tokens_per_second"]:13,.0f}  '
        f'{row["compile_s"]:11.1f}')
  return '\n'.join(lines)


def main(argv: list[str] | None = None) -> int:
  """The command line; returns the exit status."""
  numbers = lambda text: sorted(int(number) for number in text.split(','))
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.tools.scaling', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', required=True, help='of a small model')
  parser.add_argument('--batch_size', type=int, default=16, help='rows of one device (default 16)')
  parser.add_argument('--devices', type=numbers, default='1,2,4,8', help='default: 1,2,4,8')
  parser.add_argument('--processes', type=numbers, default='1,2', help='default: 1,2')
  parser.add_argument('--steps', type=int, default=10, help='timed steps of each run')
  parser.add_argument('--json', action='store_true', help='one line of JSON instead of the table')
  args, rest = parser.parse_known_args(argv)
  if min(args.devices + args.processes) < 1:
    parser.error('--devices and --processes must be at least 1')
  rows: list[dict[str, Any]] = []
  try:
    for asked in runs(args.devices, args.processes, args.batch_size):
      result = run_bench(asked, [f'--config={args.config}', f'--steps={args.steps}', *rest])
      first = rows[0]['step_ms'] if rows else result['variants'][0]['step_ms']['median']
      rows.append(figures(asked, result, first))
      print(f'{len(rows)}: {asked["processes"]} process(es), {asked["devices"]} device(s), '
            f'{asked["batch_size"]} rows: {rows[-1]["step_ms"]:.1f} ms', file=sys.stderr)
  except ScalingError as error:
    print(f'scaling: {error}', file=sys.stderr)
    return 2
  print(json.dumps({'note': _NOTE, 'runs': rows}) if args.json else describe(rows))
  return 0


if __name__ == '__main__':
  sys.exit(main())
