"""Import and export of checkpoints written by the references, and of those of bug reports."""

import json
import shutil

import numpy as np
import pytest
from etils import epath
from golden import parity_transformers as models

from bertjax.convert import export, google_tf, import_checkpoint, parameters, safetensors_file
from bertjax.convert.names import ConversionError
from bertjax.model import BertConfig

# Directory, from where its values are, and how to import it.
GOLDEN = {
    **{f'01_encoder/{name}': (name, {}) for name in ('cfg_a', 'cfg_b', 'cfg_c', 'cfg_d')},
    '07_checkpoints/hf_legacy_names_cfg_a': ('cfg_a', {}),
    '07_checkpoints/hf_bertmodel_cfg_a': ('cfg_a', {}),
    '07_checkpoints/google_tf1_cfg_a': ('cfg_a', {'hidden_act': 'gelu'}),
    '07_checkpoints/google_tf1_cfg_a/model.ckpt-12345': ('cfg_a', {'hidden_act': 'gelu'}),
    '07_checkpoints/google_tf1_cfg_c': ('cfg_c', {}),
}
OUTPUTS = {'hidden_states': 'hidden_states', 'pooler_output': 'pooled_output',
           'prediction_logits': 'mlm_logits', 'next_sentence': 'nsp_logits'}


def load(golden, name: str, tmp_path, **options) -> import_checkpoint.Imported:
  """Imports a golden checkpoint with a made-up vocabulary of its size (they have none)."""
  source, asked = GOLDEN[name]
  size = json.loads((golden / '01_encoder' / source / 'config.json').read_text())['vocab_size']
  vocab = tmp_path / 'words.txt'
  vocab.write_bytes(models.vocabulary(size))
  style = 'tf' if 'google' in name else 'hf'
  return import_checkpoint.load(f'{style}:{golden / name}', vocab=vocab, **asked, **options)


def computed(imported: import_checkpoint.Imported, batch):
  config = BertConfig(**imported.metadata['config']['model'])
  return models.compute(config, imported.params, batch)


@pytest.mark.parametrize('name', GOLDEN)
def test_imported_checkpoints_compute_the_references_values(golden, tmp_path, name):
  imported = load(golden, name, tmp_path)
  folder = golden / '01_encoder' / GOLDEN[name][0]
  stored, expected = np.load(folder / 'batches.npz'), np.load(folder / 'outputs.npz')
  batch = {key: stored[f'b0/{key}'] for key in ('input_ids', 'token_type_ids', 'attention_mask')}
  real = batch['attention_mask'][..., None] > 0
  found = computed(imported, batch)
  assert set(found) == set(OUTPUTS) if 'bertmodel' not in name else len(found) == 2
  for output, array in found.items():
    wanted = expected[f'b0/{OUTPUTS[output]}']
    over = real if array.shape[-3:-1] == real.shape[:2] else 1
    np.testing.assert_allclose(array * over, wanted * over, atol=1e-4, err_msg=output)


@pytest.mark.parametrize('name', [name for name in GOLDEN if 'google' not in name])
def test_hugging_face_to_ours_to_hugging_face_is_bit_for_bit(golden, tmp_path, name):
  import_checkpoint.save(load(golden, name, tmp_path), tmp_path / 'ckpt')
  export.export(tmp_path / 'ckpt', 'hf', tmp_path / 'hf')
  again = safetensors_file.read(epath.Path(tmp_path) / 'hf' / 'model.safetensors')
  # cfg_a of 01_encoder is what Transformers writes: canonical names, no tied copies.
  source = golden / ('01_encoder/cfg_a' if 'legacy' in name else name) / 'model.safetensors'
  before = safetensors_file.read(epath.Path(source))
  if 'bertmodel' in name:
    before = {f'bert.{key}': array for key, array in before.items()}
  assert again.keys() == before.keys()
  for key, array in again.items():
    assert array.dtype == np.float32 and array.tobytes() == before[key].tobytes(), key


@pytest.mark.parametrize('name', [name for name in GOLDEN if 'google' in name])
def test_google_to_ours_to_google_is_bit_for_bit(golden, tmp_path, name):
  imported = load(golden, name, tmp_path)
  import_checkpoint.save(imported, tmp_path / 'ckpt')
  export.export(tmp_path / 'ckpt', 'tf', tmp_path / 'tf', accept_gelu_mismatch=True)
  before, skipped = google_tf._read_variables(google_tf._prefix(epath.Path(golden / name)))
  again, none = google_tf._read_variables(epath.Path(tmp_path) / 'tf' / google_tf.PREFIX)
  assert not none and again.keys() == before.keys()
  for key, array in again.items():
    assert array.tobytes() == before[key].tobytes(), key
  assert bool(skipped) == name.endswith('12345')


def test_the_two_files_of_a_legacy_directory_are_one_model(golden, tmp_path):
  """pytorch_model.bin is read without torch."""
  folder = tmp_path / 'bin'
  shutil.copytree(golden / '07_checkpoints' / 'hf_legacy_names_cfg_a', folder)
  folder.chmod(0o755)
  (folder / 'model.safetensors').unlink()
  vocab = tmp_path / 'words.txt'
  vocab.write_bytes(models.vocabulary(100))
  from_bin = import_checkpoint.load(f'hf:{folder}', vocab=vocab)
  whole = load(golden, '07_checkpoints/hf_legacy_names_cfg_a', tmp_path)
  for name, array in parameters.flatten(whole.params).items():
    np.testing.assert_array_equal(parameters.flatten(from_bin.params)[name], array)
  assert '2 equal copies' in from_bin.report and 'position_ids' in from_bin.report


def test_b124_google_weights_through_bfloat16(golden, tmp_path):
  low = load(golden, '07_checkpoints/google_tf1_cfg_c', tmp_path, dtype='bfloat16')
  assert {array.dtype.name for array in parameters.flatten(low.params).values()} == {'bfloat16'}


# --- Bug reports (shared/bugs) -----------------------------------------------------------------


@pytest.fixture
def tiny(bugs):
  """The batch and the values of the tiny checkpoints of the reports."""
  stored = json.loads((bugs / 'ckpt_tiny_expected.json').read_text(encoding='utf-8'))
  batch = {name: np.array(stored[name]) for name in ('input_ids', 'token_type_ids',
                                                     'attention_mask')}
  return batch, stored['gelu']


def check_tiny(imported, tiny, form: str):
  batch, expected = tiny[0], tiny[1][form]
  found = computed(imported, batch)
  np.testing.assert_allclose(found['pooler_output'], expected['pooled'], atol=2e-5)
  np.testing.assert_allclose(found['next_sentence'], expected['nsp_logits'], atol=2e-5)
  np.testing.assert_allclose(found['prediction_logits'][0, 2, :8],
                             expected['mlm_logits_row0_pos2_first8'], atol=2e-5)
  assert found['prediction_logits'][0, :8].argmax(-1).tolist() == expected['mlm_argmax_row0']
  np.testing.assert_allclose(found['hidden_states'][-1, 0, 0, :4],
                             expected['sequence_row0_pos0_first4'], atol=2e-5)


@pytest.mark.parametrize('hidden_act, form', [(None, 'tanh'), ('gelu', 'erf')])
def test_b115_slots_and_counters_are_skipped_and_counted(bugs, tiny, hidden_act, form):
  imported = import_checkpoint.load(f'tf:{bugs}/ckpt_tf1_tiny/bert_model.ckpt', lowercase=True,
                                    hidden_act=hidden_act)
  assert 'used     46 variables' in imported.report
  assert 'skipped  93 optimizer slots and counters' in imported.report
  assert 'unused' not in imported.report and 'new' not in imported.report
  check_tiny(imported, tiny, form)


def test_b116_a_fine_tuned_classifier_of_google(bugs, tiny):
  origin = f'tf:{bugs}/ckpt_tf1_classifier'
  imported = import_checkpoint.load(origin, lowercase=True)
  assert imported.metadata['head'] == {
      'kind': 'classification', 'labels': ['LABEL_0', 'LABEL_1', 'LABEL_2']}
  assert 'absent   masked_lm, next_sentence' in imported.report
  stored, _ = google_tf._read_variables(epath.Path(bugs) / 'ckpt_tf1_classifier/bert_model.ckpt')
  found = computed(imported, tiny[0])
  wanted = found['pooler_output'] @ stored['output_weights'].T + stored['output_bias']
  np.testing.assert_allclose(found['classifier'], wanted, atol=1e-6)
  for_pretraining = import_checkpoint.load(origin, lowercase=True, head='pretraining')
  assert for_pretraining.metadata['missing'] == ['masked_lm', 'next_sentence']
  assert 'new      masked_lm, next_sentence' in for_pretraining.report
  assert 'unused   2: output_bias, output_weights' in for_pretraining.report


def test_b118_the_word_table_is_the_output_matrix(bugs, tiny):
  imported = import_checkpoint.load(f'hf:{bugs}/hf_tiny_legacy_names', lowercase=True)
  check_tiny(imported, tiny, 'erf')
  tables = [name for name, array in parameters.flatten(imported.params).items()
            if array.shape[0] == 384 and array.ndim == 2]
  assert tables == ['bert/embeddings/word_embeddings/embedding']


@pytest.mark.parametrize('stored', [('bias',), ('decoder.bias',), ('bias', 'decoder.bias')])
def test_b120_the_output_bias_under_either_name(bugs, tiny, tmp_path, stored):
  folder = tmp_path / 'model'
  shutil.copytree(bugs / 'hf_tiny_legacy_names', folder, copy_function=shutil.copyfile)
  folder.chmod(0o755)
  path = epath.Path(folder) / 'model.safetensors'
  tensors = safetensors_file.read(path)
  bias = tensors.pop('cls.predictions.bias')
  safetensors_file.write(path, tensors | {f'cls.predictions.{name}': bias for name in stored})
  check_tiny(import_checkpoint.load(f'hf:{folder}', lowercase=True), tiny, 'erf')


def test_b121_rows_beyond_the_vocabulary_never_win_and_go_on_export(bugs, tiny, tmp_path):
  imported = import_checkpoint.load(f'hf:{bugs}/hf_tiny_padded_vocab', lowercase=True)
  assert 'dropped  the last 8 of 272 rows' in imported.report
  check_tiny(imported, tiny, 'erf')
  assert imported.metadata['config']['model']['vocab_size'] == 264
  import_checkpoint.save(imported, tmp_path / 'ckpt')
  export.export(tmp_path / 'ckpt', 'hf', tmp_path / 'hf')
  tensors = safetensors_file.read(epath.Path(tmp_path) / 'hf' / 'model.safetensors')
  assert tensors['cls.predictions.bias'].shape == (264,)
  assert tensors['bert.embeddings.word_embeddings.weight'].shape == (264, 16)


def test_b121_fewer_rows_than_entries_stop(bugs, tmp_path):
  vocab = tmp_path / 'vocab.txt'
  content = (bugs / 'hf_tiny_padded_vocab' / 'vocab.txt').read_bytes().rstrip(b'\n')
  vocab.write_bytes(content + b''.join(b'\nmore%d' % index for index in range(9)) + b'\n')
  with pytest.raises(ConversionError, match='273 entries.*only 272 rows'):
    import_checkpoint.load(f'hf:{bugs}/hf_tiny_padded_vocab', lowercase=True, vocab=vocab)


def test_b122_a_missing_tensor_stops_the_import_by_name(bugs, tmp_path, capsys):
  code = import_checkpoint.main(['--from', f'hf:{bugs}/hf_tiny_missing_tensor', '--lowercase',
                                 '--output', str(tmp_path / 'ckpt')])
  error = capsys.readouterr().err
  assert code == 2 and 'attention.self.value.weight: not in the checkpoint' in error
  assert not (tmp_path / 'ckpt').exists()


@pytest.mark.parametrize('length', [12, 16, 40])
def test_b066_padding_and_company_change_no_vector(bugs, tiny, length):
  imported = import_checkpoint.load(f'hf:{bugs}/hf_tiny_legacy_names', lowercase=True)
  row = {name: array[1:, :3] for name, array in tiny[0].items()}
  alone = computed(imported, row)
  padded = {name: np.pad(array, [(0, 0), (0, length - 12)]) for name, array in tiny[0].items()}
  among = computed(imported, padded)
  np.testing.assert_allclose(among['hidden_states'][:, 1, :3], alone['hidden_states'][:, 0],
                             atol=1e-5)
  np.testing.assert_allclose(among['pooler_output'][1], alone['pooler_output'][0], atol=1e-5)
  np.testing.assert_allclose(alone['pooler_output'], tiny[1]['erf']['pooled'][1:], atol=2e-5)
