"""The curves: what is drawn, and what is said where nothing can be."""

import json

import pytest

from bertjax.tools import plot

PNG = b'\x89PNG\r\n\x1a\n'


def write(workdir, *records, tail=''):
  workdir.mkdir(exist_ok=True)
  text = ''.join(json.dumps(record) + '\n' for record in records)
  (workdir / 'metrics.jsonl').write_text(text + tail, encoding='utf-8')


def train(step, **values):
  return {
      'split': 'train', 'step': step, 'loss': 9.0 / step, 'masked_lm_loss': 8.0 / step,
      'masked_lm_accuracy': 0.1, 'learning_rate': 1e-4, 'grad_norm': 2.0,
      'sequences_per_second': 100.0,
  } | values


HELDOUT = {'split': 'heldout', 'step': 10, 'masked_lm_loss': 1.0, 'masked_lm_accuracy': 0.2}


def panels(monkeypatch, records):
  """{label of the axis: labels of its lines}, read from the figure that is drawn."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  seen = {}

  def look(figure):
    for axis in figure.axes:
      if axis.get_visible():
        seen[axis.get_ylabel()] = [text.get_text() for text in axis.get_legend().get_texts()]
        assert axis.get_xlabel() == 'step'

  close = plt.close
  monkeypatch.setattr(plt, 'close', lambda figure: (look(figure), close(figure)))
  assert plot.draw(records, 'run').startswith(PNG)
  return seen


def test_panels_of_pretraining(monkeypatch):
  pairs = {'next_sentence_accuracy': 0.6, 'next_sentence_majority': 0.54}
  seen = panels(monkeypatch, [
      {'split': 'start', 'step': 0, 'unigram_entropy': 6.4},
      train(1, **pairs), train(10, **pairs), HELDOUT | pairs,
      {'split': 'alarm', 'step': 10, 'message': 'words'},
  ])
  assert seen == {
      'masked LM loss (nats)': ['training', 'held-out', 'unigram entropy (6.400)', 'alarm'],
      'masked LM accuracy': ['training', 'held-out', 'alarm'],
      'next sentence accuracy': ['training', 'held-out', 'majority rate (0.540)', 'alarm'],
      'learning rate': ['training', 'alarm'],
      'gradient norm (mean)': ['training', 'alarm'],
      'sequences per second': ['training', 'alarm'],
  }


def test_a_run_without_pairs_has_no_such_panel(monkeypatch):
  seen = panels(monkeypatch, [train(1), train(2)])
  assert 'next sentence accuracy' not in seen
  assert len(seen) == 5


def test_the_command(tmp_path, capsys):
  write(tmp_path / 'run', train(1), train(2), HELDOUT)
  assert plot.main([str(tmp_path / 'run')]) == 0
  output = tmp_path / 'run' / 'curves.png'
  assert capsys.readouterr().out.strip() == str(output)
  assert output.read_bytes().startswith(PNG)
  assert plot.main([str(tmp_path / 'run'), '--output', str(tmp_path / 'x.png')]) == 0
  assert (tmp_path / 'x.png').read_bytes().startswith(PNG)
  assert sorted(p.name for p in tmp_path.rglob('*.tmp')) == []


def test_only_a_heldout_record(tmp_path):
  write(tmp_path, HELDOUT)
  assert plot.main([str(tmp_path)]) == 0


@pytest.mark.parametrize(('tail', 'message'), [
    ('{"split": "train", "st', 'metrics.jsonl, line 3: not a record'),
    ('[1, 2]\n', 'line 3: not a record'),
    ('{"step": 3}\n', 'line 3: not a record'),
])
def test_a_bad_line_is_named(tmp_path, capsys, tail, message):
  write(tmp_path, train(1), train(2), tail=tail)
  assert plot.main([str(tmp_path)]) == 2
  said = capsys.readouterr()
  assert message in said.err and said.out == ''
  assert not (tmp_path / 'curves.png').exists()


def test_no_workdir_no_file_nothing_in_it(tmp_path, capsys):
  assert plot.main([str(tmp_path / 'none')]) == 2
  assert 'is not a folder' in capsys.readouterr().err
  assert plot.main([str(tmp_path)]) == 2
  assert 'metrics.jsonl does not exist' in capsys.readouterr().err
  write(tmp_path)
  assert plot.main([str(tmp_path)]) == 2
  assert 'holds no training step yet' in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path, capsys):
  write(tmp_path, train(1), train(2))
  assert plot.main([str(tmp_path), '--output', str(tmp_path / 'none' / 'x.png')]) == 2
  assert 'x.png' in capsys.readouterr().err


def test_bad_usage():
  with pytest.raises(SystemExit) as exit_:
    plot.main([])
  assert exit_.value.code == 2
