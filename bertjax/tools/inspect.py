"""What is in a checkpoint: config, parameters, data position, and which steps are there.

    python -m bertjax.tools.inspect --checkpoint runs/quickstart
    python -m bertjax.tools.inspect --checkpoint runs/quickstart/checkpoints/3000 --json

The path is a workdir, its checkpoints folder or one step's folder. Two bit-equal runs have the
same parameter hash. Exit code 2 with one line on stderr if there is nothing to show.
"""

import argparse
import json
import math
import os
import sys
from typing import Any

from etils import epath

from bertjax import step_folder
from bertjax.step_folder import CheckpointError


def _flat(config: Any, prefix: str = '') -> dict[str, Any]:
  """Nested settings as dotted names."""
  if not isinstance(config, dict) or not config:
    return {prefix: config}
  return {name: value for key, inner in config.items()
          for name, value in _flat(inner, f'{prefix}.{key}' if prefix else str(key)).items()}


def _partition(array) -> str | None:
  """The stored PartitionSpec in words, as in 'data, None'; None where it was not sharded by one."""
  spec = getattr(array.sharding_metadata, 'partition_spec', None)
  if spec is None:
    return None
  return ', '.join('+'.join(axis) if isinstance(axis, list | tuple) else str(axis)
                   for axis in spec) or 'replicated'


def describe(path: epath.PathLike, step: int | None = None) -> dict[str, Any]:
  """All that the tool shows, ready for JSON.

  Raises:
    CheckpointError: no checkpoint there, none complete, or the step is absent or damaged.
  """
  from bertjax import checkpoint  # imports JAX: not needed for --help or to say what is wrong
  folder = step_folder.find(path, step)
  root, single = step_folder.locate(path)
  there = {} if single else {n: step_folder.damage(f) for n, f in step_folder.steps(root).items()}
  params = checkpoint.restore_params(folder)
  arrays = checkpoint.leaves(checkpoint.stored(folder)['params'])
  table = [{'path': name, 'shape': list(array.shape), 'dtype': str(array.dtype),
            'partition': _partition(array), 'count': math.prod(array.shape)}
           for name, array in sorted(arrays.items())]
  return {
      'folder': str(folder),
      **step_folder.read_metadata(folder),
      'parameters': table,
      'num_parameters': sum(row['count'] for row in table),
      'parameter_hash': checkpoint.parameter_hash(params),
      'tokenizer_files': step_folder.sizes(folder / step_folder.OURS / 'tokenizer')
      if (folder / step_folder.OURS / 'tokenizer').is_dir() else {},
      'complete_steps': sorted(n for n, reason in there.items() if reason is None),
      'damaged_steps': {str(n): reason for n, reason in sorted(there.items()) if reason},
  }


def _columns(rows: list[list[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join('  ' + '  '.join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def render(about: dict[str, Any]) -> str:
  """The description as text for a terminal."""
  shown_apart = ('folder', 'parameters', 'num_parameters', 'parameter_hash', 'tokenizer_files',
                 'complete_steps', 'damaged_steps', 'config', 'position')
  parts = [
      about['folder'],
      _columns([[name, str(value)] for name, value in about.items() if name not in shown_apart]),
      'Data position',
      _columns([[name, str(value)] for name, value in about['position'].items()]),
      'Config',
      _columns([[name, repr(value)] for name, value in _flat(about.get('config', {})).items()]),
      'Parameters',
      _columns([['path', 'shape', 'dtype', 'partition', 'count']] + [
          [row['path'], 'x'.join(map(str, row['shape'])) or '()', row['dtype'],
           row['partition'] or '-', f'{row["count"]:,}'] for row in about['parameters']]
          + [['total', '', '', '', f'{about["num_parameters"]:,}']]),
      f'Parameter hash (SHA-256)\n  {about["parameter_hash"]}',
  ]
  if about['tokenizer_files']:
    parts += ['Tokenizer', _columns(
        [[name, f'{size:,} bytes'] for name, size in about['tokenizer_files'].items()])]
  if about['complete_steps']:
    parts += ['Steps', '  complete: ' + ', '.join(map(str, about['complete_steps']))]
  parts += [f'  {step} is damaged: {reason}' for step, reason in about['damaged_steps'].items()]
  return '\n'.join(parts)


def main(argv: list[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m bertjax.tools.inspect', description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkpoint', required=True, metavar='PATH',
                      help='a workdir, its checkpoints folder, or one step in it')
  parser.add_argument('--step', type=int, help='which step (default: the newest complete one)')
  parser.add_argument('--json', action='store_true', help='print JSON')
  flags = parser.parse_args(argv)
  # Looking must not take a GPU or TPU away from the run that writes these checkpoints.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  try:
    about = describe(flags.checkpoint, flags.step)
  except CheckpointError as error:
    print(f'inspect: {error}', file=sys.stderr)
    return 2
  print(json.dumps(about, indent=2, ensure_ascii=False) if flags.json else render(about))
  return 0


if __name__ == '__main__':
  sys.exit(main())
