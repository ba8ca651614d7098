"""Draws the curves of a run: `python -m bertjax.tools.plot WORKDIR [--output curves.png]`.

Reads WORKDIR/metrics.jsonl and draws losses, accuracies, learning rate, gradient norm and speed.
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence

from etils import epath

Records = list[dict]
_MOST_SCORES = 4  # of a fine-tuning run; SQuAD has a dozen

# One colour for a meaning in all panels; they differ in grey and for the colour-blind as well.
_TRAIN, _HELDOUT, _BASELINE, _ALARM = '#4477aa', '#cc3311', '#555555', '#ee9933'


class PlotError(ValueError):
  """What the user can mend, in words."""


def read_records(file: epath.Path) -> Records:
  """The records of a metrics.jsonl.

  Raises:
    PlotError: no such file, nothing in it, or a line that is no record, with its number.
  """
  if not file.exists():
    raise PlotError(f'{file} does not exist; give the --workdir of a run that has begun to train')
  records = []
  for number, line in enumerate(file.read_text(encoding='utf-8').split('\n'), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      record['split'], record['step']
    except (ValueError, TypeError, KeyError) as error:
      raise PlotError(
          f'{file}, line {number}: not a record ({error!r}). The last line of a run that was '
          'killed may be cut short; going on with the run mends it, or delete the line'
      ) from None
    records.append(record)
  if not any(record['split'] in ('train', 'heldout', 'dev') for record in records):
    raise PlotError(f'{file} holds no training step yet; wait for the first line of the run')
  return records


def draw(records: Records, title: str) -> bytes:
  """The figure as a PNG."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  panels = _panels(records)
  rows = -(-len(panels) // 2)
  figure, axes = plt.subplots(
      rows, 2, figsize=(13, 3.7 * rows), squeeze=False, layout='constrained')
  figure.suptitle(title)
  for axis, (name, label, baseline) in zip(axes.flat, panels, strict=False):
    _draw_panel(axis, records, name, baseline)
    axis.set(xlabel='step', ylabel=label)
    axis.xaxis.set_major_formatter(lambda step, _: f'{step:,.0f}')
    if name == 'grad_norm':  # spans orders of magnitude where it matters
      axis.set_yscale('log')
      axis.yaxis.set_minor_formatter(lambda value, _: f'{value:g}' * (f'{value:e}'[0] in '25'))
    if name in ('grad_norm', 'learning_rate'):
      axis.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
    if name == 'sequences_per_second':  # from 0: its noise is not the message
      axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    axis.legend(fontsize='small')
  for axis in axes.flat[len(panels):]:
    axis.set_visible(False)
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=110)
  plt.close(figure)
  return file.getvalue()


# Name in the records, label of the axis, (name, label) of what it is compared with.
_PANELS = (
    ('masked_lm_loss', 'masked LM loss (nats)', ('unigram_entropy', 'unigram entropy')),
    ('masked_lm_accuracy', 'masked LM accuracy', None),
    ('next_sentence_accuracy', 'next sentence accuracy',
     ('next_sentence_majority', 'majority rate')),
    ('learning_rate', 'learning rate', None),
    ('grad_norm', 'gradient norm (mean)', None),
    ('sequences_per_second', 'sequences per second', None),
)


def _panels(records: Records) -> list[tuple[str, str, tuple[str, str] | None]]:
  """What there is to draw; of a fine-tuning run the loss and the scores on dev come first."""
  scores = dict.fromkeys(
      name for r in records if r['split'] == 'dev' for name in r
      if name not in ('split', 'step', 'loss') and '/' not in name)
  panels = [('loss', 'loss', None)] * any(r['split'] == 'dev' for r in records)
  panels += [(name, f'{name} on dev', (f'baseline/{name}', 'knows nothing'))
             for name in list(scores)[:_MOST_SCORES]]
  trained = any(_series(records, 'train', panel[0])[0] for panel in _PANELS)
  split = 'train' if trained else 'heldout'  # a run that was only evaluated
  return panels + [panel for panel in _PANELS if _series(records, split, panel[0])[0]]


def _draw_panel(axis, records: Records, name: str, baseline: tuple[str, str] | None) -> None:
  steps, values = _series(records, 'train', name)
  # Points show where the few records of a short run lie; in a long one they would be a smear.
  marker = '.' if len(steps) < 60 else None
  if steps:
    axis.plot(steps, values, color=_TRAIN, label='training', marker=marker)
  for split, label in (('heldout', 'held-out'), ('dev', 'dev')):
    steps, values = _series(records, split, name)
    if steps:
      axis.plot(steps, values, color=_HELDOUT, label=label, marker='o', markersize=4, lw=1)
  if baseline is not None:
    _draw_baseline(axis, records, *baseline)
  for i, step in enumerate(r['step'] for r in records if r['split'] == 'alarm'):
    axis.axvline(step, color=_ALARM, ls=':', label=None if i else 'alarm')


def _draw_baseline(axis, records: Records, name: str, label: str) -> None:
  found = [r[name] for r in records if r.get(name) is not None]
  if found:
    # The rate of labels differs a little from record to record: their median is the line.
    value = sorted(found)[len(found) // 2]
    axis.axhline(value, color=_BASELINE, ls='--', lw=1, label=f'{label} ({value:.3f})')


def _series(records: Records, split: str, name: str) -> tuple[list, list]:
  points = [(r['step'], r[name]) for r in records
            if r['split'] == split and r.get(name) is not None]
  return [step for step, _ in points], [value for _, value in points]


def main(arguments: Sequence[str] | None = None) -> int:
  """The command line; returns the exit status."""
  parser = argparse.ArgumentParser(prog='python -m bertjax.tools.plot', description=(
      'Draws the curves of a run (WORKDIR/metrics.jsonl) to a PNG file.'))
  parser.add_argument('workdir', help='the --workdir of the run')
  parser.add_argument('--output', help='the PNG file to write (default: WORKDIR/curves.png)')
  options = parser.parse_args(arguments)
  workdir = epath.Path(options.workdir)
  output = epath.Path(options.output) if options.output else workdir / 'curves.png'
  try:
    if not workdir.is_dir():
      raise PlotError(f'{workdir} is not a folder; give the --workdir of a run')
    picture = draw(read_records(workdir / 'metrics.jsonl'), title=workdir.name)
    whole = output.with_name(output.name + '.tmp')
    whole.write_bytes(picture)
    whole.replace(output)
  except (PlotError, OSError) as error:
    print(f'plot: {error}', file=sys.stderr)
    return 2
  print(output)
  return 0


if __name__ == '__main__':
  sys.exit(main())
