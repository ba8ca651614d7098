"""Times the train step of a pre-training configuration on the devices there are.

  python -m bertjax.tools.bench --config=configs/base.py --data=shards/ --matmul
  python -m bertjax.tools.bench --config=configs/large.py:fast --phase=1 \\
      --compare=attention=xla,cudnn --trace=profile/
  python -m bertjax.tools.bench --config=configs/tiny.py --data=shards/ \\
      --compare=max_examples_per_row=1,8 --config.phases.seq_length=512

It is the step, the loop and the input pipeline of bertjax.main. Without --data the pipeline reads
random words, in sentences and documents as long as those of English prose: every row is real, its
text is not. `--compare` times variants in turn, round after round, and prints ratios; given several
times, the lists go together: the first values make the first variant. A key is that of a phase or
of the model, or has its section (`mesh.fsdp`). `--config.KEY=VALUE` changes all variants.

Exit codes: 0; 1 a loss was not finite; 2 what was asked for cannot be run.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bertjax import host_memory

_TOP = 10  # groups of operations that are shown, and more until three are no matrix products
_SHORT = ('batch_size', 'seq_length', 'accumulate', 'attention', 'remat')


# --- What is asked for ---------------------------------------------------------------------------


def read_config(path: str, phase: int, data: str) -> dict[str, Any]:
  """A configuration with one of its phases, every default written out, on the data given.

  Raises:
    ConfigError: no such file or phase, or nothing that can be run.
  """
  from bertjax import settings as settings_lib
  from bertjax.tools import doctor

  try:
    settings = doctor.load_config(path, [data])
  except settings_lib.ConfigError:
    raise
  except (AttributeError, SyntaxError, TypeError, ValueError) as error:
    raise settings_lib.ConfigError(f'--config={path}: {error}') from error
  values, count = settings_lib.to_json(settings), len(settings.phases)
  if not -count <= phase < count:
    known = 'phase 0 only' if count == 1 else f'phases 0 to {count - 1}'
    raise settings_lib.ConfigError(f'--phase={phase}: {path} has {known}')
  return values | {'phases': [values['phases'][phase]]}


def changed(values: Mapping[str, Any], key: str, text: str) -> dict[str, Any]:
  """The configuration with one value changed.

  Args:
    values: from `read_config`.
    key: of the phase or the model, or with its section: 'data.whole_word_masking'.
    text: the value as it is written on a command line.

  Raises:
    ConfigError: there is no such key, with those that are near.
  """
  from bertjax import model
  from bertjax import settings as settings_lib

  section, _, name = key.rpartition('.')
  if not section and name not in values:
    phase, bert = ([field.name for field in dataclasses.fields(cls)]
                   for cls in (settings_lib.Phase, model.BertConfig))
    if name not in (*phase, *bert):
      near = difflib.get_close_matches(name, [*phase, *bert], 3) or _SHORT
      raise settings_lib.ConfigError(
          f'no key {name!r} of a phase or of the model (near: {", ".join(near)}); one of another '
          'section has its name before it: mesh.fsdp')
    section = 'phases' if name in phase else 'model'
  if not section:
    return {**values, name: _value(text, values[name])}
  old = values['phases'][0] if section == 'phases' else values.get(section)
  if not isinstance(old, dict):
    sections = ', '.join(sorted(name for name, value in values.items() if isinstance(value, dict)))
    raise settings_lib.ConfigError(f'{key}: there is no section {section!r}, but {sections}')
  new = {**old, name: _value(text, old.get(name))}
  return {**values, section: [new] if section == 'phases' else new}


def _value(text: str, old: Any) -> Any:
  """A number, true or false where it is one, else the text; a float or a tuple where one was."""
  if isinstance(old, list | tuple):
    return tuple(_value(item, None) for item in re.findall(r'[^(),\s]+', text))
  try:
    value = json.loads(text.lower())
  except ValueError:
    return text
  return float(value) if isinstance(old, float) and type(value) is int else value


def variants(values: Mapping[str, Any], compare: Sequence[str]) -> dict[str, dict[str, Any]]:
  """The configurations to time, by name.

  Args:
    values: what all have in common.
    compare: 'KEY=A,B,...' each; the lists go together and are equally long.

  Raises:
    ConfigError: no such key, or lists that do not go together.
  """
  from bertjax.config import ConfigError

  lists = [(key, text.split(',')) for key, _, text in (one.partition('=') for one in compare)]
  if any(len(texts) < 2 for _, texts in lists) or len({len(texts) for _, texts in lists}) > 1:
    raise ConfigError(f'--compare={" --compare=".join(compare)}: write KEY=A,B, with at least two '
                      'values and as many for every key')
  if not lists:
    return {'step': dict(values)}
  made = {}
  for texts in zip(*(texts for _, texts in lists), strict=True):
    one = dict(values)
    for (key, _), text in zip(lists, texts, strict=True):
      one = changed(one, key, text)
    name = ' '.join(f'{key}={text}' for (key, _), text in zip(lists, texts, strict=True))
    made[f'{name} again' if name in made else name] = one  # against itself: how good is a ratio?
  return made


@contextlib.contextmanager
def data_of(path: str, values: Mapping[str, Any]) -> Iterator[str]:
  """The shards that are given, or made-up ones for as long as they are needed."""
  if path:
    yield path
    return
  from bertjax.tools import bench_variant

  with tempfile.TemporaryDirectory(prefix='bertjax-bench-') as folder:
    vocab_size = values['model']['vocab_size'] or values['data']['vocab_size']
    yield bench_variant.make_up_data(pathlib.Path(folder), vocab_size)


# --- The measurement -----------------------------------------------------------------------------


def measure(args: argparse.Namespace, asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Times the variants and returns all figures.

  Raises:
    One of errors.EXPECTED, in words.
  """
  import jax

  from bertjax.tools import bench_variant

  made = [bench_variant.Variant(name, values) for name, values in asked.items()]
  for variant in made:  # not before all are known to be possible
    variant.begin()
  bench_variant.compare(made, args.steps, args.rounds or (3 if len(made) > 1 else 1))
  reports = [variant.report() for variant in made]
  memory, memory_of = bench_variant.peak_memory()
  matmul = bench_variant.matmul_rate() if args.matmul else None
  for variant, report in zip(made, reports, strict=True):
    report['step_time_ratio'] = bench_variant.ratio(variant, made[0])
    rate = report['model_flops_per_second_and_device']
    report['share_of_matmul_rate'] = rate / matmul if matmul else None
    examples, tokens = variant.pipeline_rate()
    report['pipeline'] = {'examples_per_second': examples, 'real_tokens_per_second': tokens}
    if args.trace:
      folder = pathlib.Path(args.trace, re.sub(r'[^\w.=+-]+', '_', variant.name))
      report['costs'] = [dataclasses.asdict(cost) for cost in variant.trace(str(folder))]
  return {
      'config': args.config, 'phase': args.phase, 'data': args.data or 'made-up text',
      'device_kind': jax.devices()[0].device_kind, 'devices': jax.device_count(),
      'processes': jax.process_count(), 'jax': jax.__version__,
      'matmul_flops_per_second': matmul, 'peak_memory_bytes': memory, 'peak_memory_of': memory_of,
      'compilation_cache': jax.config.jax_compilation_cache_dir, 'variants': reports}


# --- What is printed -----------------------------------------------------------------------------


def describe(result: Mapping[str, Any]) -> str:
  """All figures in words."""
  matmul = result['matmul_flops_per_second']
  lines = [
      f'{result["config"]}, phase {result["phase"]}, on {result["devices"]} x '
      f'{result["device_kind"]} in {result["processes"]} process(es), JAX {result["jax"]}',
      f'data: {result["data"]}' + (
          '' if result['data'] != 'made-up text' else
          ' (random words, lengths of English prose; every row is real)'),
      f'peak memory: {_gb(result["peak_memory_bytes"])} of the {result["peak_memory_of"]}'
      + (', all variants together' if len(result['variants']) > 1 else '')]
  if matmul:
    lines.append(f'bf16 matrix product: {matmul / 1e12:.4g} TFLOP/s of one device')
  for report in result['variants']:
    lines += ['', *_variant_lines(report, result)]
  if len(result['variants']) > 1:
    lines += ['', *_comparison(result['variants'])]
  return '\n'.join(lines)


def _variant_lines(report: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
  step, first, pipeline = report['step_ms'], report['first_step_seconds'], report['pipeline']
  packed, wait = report['max_examples_per_row'], report['wait_share']
  rate = report['model_flops_per_second_and_device']
  mfu = 'MFU unknown: unknown chip' if report['mfu'] is None else (
      f'MFU {report["mfu"]:.1%} of the bf16 peak')
  if report['share_of_matmul_rate'] is not None:
    mfu += f', {report["share_of_matmul_rate"]:.1%} of the measured matrix rate'
  needed = report['own_share'] * report['examples_per_second']
  times = pipeline['examples_per_second'] / needed
  return [
      f'{report["name"]}: {report["batch_size"]} x {report["seq_length"]}, attention '
      f'{report["attention"]} (dropout {report["attention_probs_dropout_prob"]}), remat '
      f'{report["remat"]}, {report["dtype"]}, accumulate {report["accumulate"]}, mesh '
      f'{report["mesh"]}' + (f', packed up to {packed} in a row' if packed > 1 else ''),
      f'  step        {step["median"]:.2f} ms (10 % below {step["p10"]:.2f}, 10 % above '
      f'{step["p90"]:.2f}; {report["steps"]} steps)',
      f'  speed       {report["examples_per_second"]:,.1f} '
      f'{"examples" if packed > 1 else "sequences"}/s, {report["real_tokens_per_second"]:,.0f} '
      f'real tokens/s ({report["real_token_share"]:.1%} of the places are real)',
      f'  model       {rate / 1e12:.4g} TFLOP/s and device; {mfu}',
      f'  pipeline    {pipeline["examples_per_second"]:,.0f} examples/s a process, alone: '
      f'{times:.1f} times what the steps take; the loop waited '
      + ('for too few steps to say' if wait is None else f'{wait:.2%} of the time'),
      f'  first step  {sum(first.values()):.1f} s: '
      + ', '.join(f'{part.replace("_", " ")} {seconds:.1f}' for part, seconds in first.items())
      + (', compiled programs are cached' if result['compilation_cache'] else ''),
      f'  compiled    arguments {_gb(report["compiled_bytes"]["arguments"])}, temporaries '
      f'{_gb(report["compiled_bytes"]["temporaries"])} a device; last loss {report["loss"]:.3f}',
      *_cost_lines(report.get('costs'))]


def _cost_lines(costs: Sequence[Mapping[str, Any]] | None) -> list[str]:
  """The costliest groups: so many, and so many more that three are no matrix products."""
  if costs is None:
    return []
  if not costs:
    return ['  profile     holds no operations']
  others = [cost for cost in costs if cost['kind'] != 'matmul'][:3]
  shown = [cost for i, cost in enumerate(costs) if i < _TOP or cost in others]
  products = sum(cost['share'] for cost in costs if cost['kind'] == 'matmul')
  return [f'  profile     {products:.1%} of the device time in matrix products; costliest:',
          *(f'    {cost["share"]:6.1%} {cost["milliseconds"]:9.3f} ms  {cost["kind"]:10} '
            f'{cost["name"]}' for cost in shown)]


def _comparison(reports: Sequence[Mapping[str, Any]]) -> list[str]:
  """One line each, as multiples of the first."""
  base, width = reports[0], max(len(report['name']) for report in reports)
  lines = [f'{"against the first:":{width}}  step time  examples/s  real tokens/s']
  for report in reports:
    # By the ratio of the rounds, which ran side by side, rather than by the two medians.
    more = [report[name] / base[name] * report['step_ms']['median'] / base['step_ms']['median']
            / report['step_time_ratio'] for name in (
                'examples_per_second', 'real_tokens_per_second')]
    lines.append(f'{report["name"]:{width}}  {report["step_time_ratio"]:8.3f}x '
                 f'{more[0]:10.3f}x  {more[1]:12.3f}x')
  return lines


def _gb(nbytes: int) -> str:
  return f'{nbytes / 2**30:.2f} GiB'


# --- The command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
  """The options; what is left over is --config.KEY=VALUE."""
  made = argparse.ArgumentParser(
      prog='python -m bertjax.tools.bench', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  made.add_argument('--config', required=True, help='e.g. configs/large.py:fast')
  made.add_argument('--phase', type=int, default=0, help='which one (default: the first)')
  for name in _SHORT:
    made.add_argument(f'--{name}', help='default: that of the configuration')
  made.add_argument('--data', default='', help='shards of bertjax.data.build, several with commas')
  made.add_argument('--steps', type=int, default=20, help='timed steps, of each round')
  made.add_argument('--rounds', type=int, help='default: 1, of a comparison 3')
  made.add_argument('--compare', action='append', default=[], metavar='KEY=A,B')
  made.add_argument('--matmul', action='store_true', help="measure the chip's bf16 matrix rate")
  made.add_argument('--trace', help='folder for a profile, of which the costs are printed')
  made.add_argument('--json', nargs='?', const='-', metavar='FILE',
                    help='one line of JSON instead of words; to a file: besides words')
  made.add_argument('--coordinator_address', help='HOST:PORT of process 0, where there are several')
  made.add_argument('--num_processes', type=int)
  made.add_argument('--process_id', type=int)
  made.add_argument('--distributed', action='store_true',
                    help='several processes, found out from Cloud TPU, Slurm or GKE')
  made.add_argument('--platform', default='auto', choices=['auto', 'cpu', 'gpu', 'tpu'],
                    help='a platform that is absent is an error')
  return made


def main(argv: list[str] | None = None) -> int:
  """The command line; returns the exit status."""
  args, rest = parser().parse_known_args(argv)
  if args.steps < 1 or (args.rounds is not None and args.rounds < 1):
    parser().error('--steps and --rounds must be at least 1')
  changes = [re.fullmatch(r'--config\.([\w.]+)=(.*)', word) for word in rest]
  if None in changes:
    parser().error(f'unknown: {rest[changes.index(None)]} (changes are --config.KEY=VALUE)')
  changes = [found.groups() for found in changes]
  changes += [(name, value) for name in _SHORT if (value := getattr(args, name)) is not None]
  host_memory.keep_freed_memory()

  from bertjax import errors, hosts

  party = None
  try:
    hosts.request_platform(args.platform)
    party = hosts.start(args.coordinator_address, args.num_processes, args.process_id,
                        find_out=args.distributed, timeout=120)
    hosts.announce(args.platform)
    _run(args, changes)
    code = 0
  except errors.EXPECTED as error:
    print(f'bench: {error}', file=sys.stderr)
    code = 2 if isinstance(error, ValueError) else 1
  return hosts.leave(party, code)


def _run(args: argparse.Namespace, changes: Sequence[tuple[str, str]]) -> None:
  import jax

  from bertjax import settings as settings_lib

  values = read_config(args.config, args.phase, args.data or '.')
  for key, text in changes:
    values = changed(values, key, text)
  asked = variants(values, args.compare)
  for one in asked.values():
    settings_lib.from_config(one)  # all of them, before the first is compiled
  with data_of(args.data, values) as data:
    result = measure(args, {name: changed(one, 'data.path', data) for name, one in asked.items()})
  if jax.process_index() == 0:
    print(json.dumps(result) if args.json == '-' else describe(result))
    if args.json not in (None, '-'):
      pathlib.Path(args.json).write_text(json.dumps(result) + '\n', encoding='utf-8')


if __name__ == '__main__':
  sys.exit(main())
