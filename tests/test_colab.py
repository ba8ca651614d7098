"""The notebook, executed end to end on a tiny model and local data."""

import pathlib

import nbclient
import nbformat
import pytest
import small_checkpoint

from bertjax.convert import export

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK = ROOT / 'colab' / 'finetune.ipynb'


def read() -> nbformat.NotebookNode:
  return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_committed_without_outputs():
  for cell in read().cells:
    if cell.cell_type == 'code':
      assert not cell.outputs and cell.execution_count is None


@pytest.mark.slow
def test_the_notebook_runs_end_to_end(tmp_path):
  small_checkpoint.make(tmp_path / 'tiny', 'pretraining')
  export.export(tmp_path / 'tiny', 'hf', tmp_path / 'hf')
  data = tmp_path / 'glue_data' / 'SST-2'
  data.mkdir(parents=True)
  rows = [f'the river is {word}\t{label}' for word, label in (('red', 1), ('blue', 0))] * 20
  for name in ('train.tsv', 'dev.tsv'):
    (data / name).write_text('\n'.join(['sentence\tlabel', *rows]) + '\n', encoding='utf-8')
  workdir = tmp_path / 'run'

  notebook = read()
  parameters = next(c for c in notebook.cells if 'parameters' in c.metadata.get('tags', ()))
  parameters.source = '\n'.join([
      f'WEIGHTS = {str(tmp_path / "hf")!r}', "TASK = 'sst2'",
      f'DATA = {str(tmp_path / "glue_data")!r}', f'WORKDIR = {str(workdir)!r}',
      "OPTIONS = ['--config.seq_length=16', '--config.batch_size=8',"
      " '--config.num_epochs=4', '--config.optimizer.learning_rate=3e-3']",
      "SENTENCE = 'the river is red'"])
  nbclient.NotebookClient(
      notebook, timeout=600, resources={'metadata': {'path': str(ROOT)}}).execute()

  texts = [output.get('text', '') for cell in notebook.cells if cell.cell_type == 'code'
           for output in cell.outputs]
  assert any('Training is complete' in text for text in texts)
  assert any(text.startswith('positive {') for text in texts), texts[-3:]
  pictures = [output for cell in notebook.cells if cell.cell_type == 'code'
              for output in cell.outputs if 'image/png' in output.get('data', {})]
  assert len(pictures) == 1
  assert (workdir / 'hf' / 'model.safetensors').exists()
