"""Import and export of small random models, with nothing from outside the repository."""

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from etils import epath
from golden import parity_transformers as models

from bertjax import checkpoint, heads
from bertjax.convert import (
  export,
  google_tf,
  hugging_face,
  import_checkpoint,
  names,
  parameters,
  safetensors_file,
)
from bertjax.convert.names import ConversionError
from bertjax.model import BertConfig

CONFIG = BertConfig(**models.SIZES)
TANH = dataclasses.replace(CONFIG, hidden_act='gelu_tanh')
LABELS = {kind: [f'läbel {i}' for i in range(number)] for kind, number in models.OUTPUTS.items()}
SWITCHES = b'{"do_lower_case": true}'


def make(workdir: pathlib.Path, kind='pretraining', config=CONFIG, params=None, head=None):
  """A checkpoint of ours with random parameters; returns them."""
  params = models.random_params(config, kind) if params is None else params
  labels = LABELS[kind] if kind in hugging_face.LABELLED else []
  checkpoint.save_params(workdir, 5, params, {
      'config': {'model': dataclasses.asdict(config)},
      'head': {'kind': kind, 'labels': labels, **(head or {})},
  }, {'vocab.txt': models.vocabulary(config.vocab_size), 'tokenizer_config.json': SWITCHES})
  return params


def exported(tmp_path: pathlib.Path, to='hf', kind='pretraining', config=CONFIG, **options):
  make(tmp_path / 'run', kind, config)
  export.export(tmp_path / 'run', to, tmp_path / to, **options)
  return tmp_path / to


def rewrite(folder: pathlib.Path, change):
  """Lets `change` edit the tensors and the config of an exported directory."""
  path = epath.Path(folder) / 'model.safetensors'
  tensors, config = safetensors_file.read(path), json.loads((folder / 'config.json').read_text())
  change(tensors, config)
  safetensors_file.write(path, tensors)
  (folder / 'config.json').write_text(json.dumps(config))


def assert_same(left: dict, right: dict):
  left, right = parameters.flatten(left), parameters.flatten(right)
  assert left.keys() == right.keys()
  for name in left:
    assert left[name].dtype == right[name].dtype, name
    assert left[name].tobytes() == right[name].tobytes(), name


# --- Round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize('to', ['hf', 'tf'])
@pytest.mark.parametrize('kind', names.GROUPS)
def test_ours_out_and_in_again_is_bit_for_bit(tmp_path, kind, to):
  params = make(tmp_path / 'run', kind, TANH, head={'task': 'x', 'null_threshold': -1.25})
  export.export(tmp_path / 'run', to, tmp_path / 'out')
  imported = import_checkpoint.load(f'{to}:{tmp_path / "out"}')
  assert_same(imported.params, params)
  kept, stored = imported.metadata, checkpoint.read_metadata(tmp_path / 'run')
  assert kept['config'] == stored['config'] and kept['head'] == stored['head']
  assert kept['missing'] == [group for group in ('pooler', 'masked_lm', 'next_sentence')
                             if group not in names.GROUPS[kind]]
  assert imported.tokenizer_files['vocab.txt'] == models.vocabulary(CONFIG.vocab_size)


def test_an_import_is_a_checkpoint_like_any_other_and_comes_out_again(tmp_path):
  folder = exported(tmp_path)
  code = import_checkpoint.main(['--from', f'hf:{folder}', '--output', str(tmp_path / 'ckpt')])
  assert code == 0
  metadata = checkpoint.read_metadata(tmp_path / 'ckpt')
  assert metadata['step'] == 0 and metadata['position'] == {} and metadata['missing'] == []
  assert_same(checkpoint.restore_params(tmp_path / 'ckpt'),
              checkpoint.restore_params(tmp_path / 'run'))
  export.export(tmp_path / 'ckpt', 'hf', tmp_path / 'again')
  for name in ('model.safetensors', 'config.json', 'vocab.txt'):
    assert (tmp_path / 'again' / name).read_bytes() == (folder / name).read_bytes()


def test_the_word_table_goes_out_unpadded_and_tied(tmp_path):
  """Also B118: one matrix, under the name that Transformers ties the other to."""
  tensors = safetensors_file.read(epath.Path(exported(tmp_path)) / 'model.safetensors')
  assert tensors['bert.embeddings.word_embeddings.weight'].shape == (140, 32)
  assert tensors['cls.predictions.bias'].shape == (140,)
  assert not [name for name in tensors if 'decoder' in name]


@pytest.mark.parametrize('kind, architecture, problem', [
    ('pretraining', 'BertForPreTraining', None), ('encoder', 'BertModel', None),
    ('classification', 'BertForSequenceClassification', 'single_label_classification'),
    ('regression', 'BertForSequenceClassification', 'regression'),
    ('multi_label', 'BertForSequenceClassification', 'multi_label_classification'),
    ('choice', 'BertForMultipleChoice', None), ('tagging', 'BertForTokenClassification', None),
    ('span', 'BertForQuestionAnswering', None)])
def test_config_json_says_what_transformers_must_build(tmp_path, kind, architecture, problem):
  values = json.loads((exported(tmp_path, kind=kind) / 'config.json').read_text(encoding='utf-8'))
  assert values['architectures'] == [architecture] and values['model_type'] == 'bert'
  assert values.get('problem_type') == problem
  assert values['vocab_size'] == 140 and values['torch_dtype'] == 'float32'
  if kind in hugging_face.LABELLED:
    assert values['id2label'] == {str(i): label for i, label in enumerate(LABELS[kind])}
    assert values['label2id'] == {label: i for i, label in enumerate(LABELS[kind])}


@pytest.mark.parametrize('ours, theirs', [
    ('gelu', 'gelu'), ('gelu_tanh', 'gelu_new'), ('relu', 'relu'), ('silu', 'silu')])
def test_activations_keep_their_meaning(tmp_path, ours, theirs):
  folder = exported(tmp_path, config=dataclasses.replace(CONFIG, hidden_act=ours))
  assert json.loads((folder / 'config.json').read_text())['hidden_act'] == theirs
  assert hugging_face.read(folder).config.hidden_act == ours


def test_what_a_pretraining_checkpoint_lacks_decides_the_class(tmp_path):
  whole = models.random_params(CONFIG, 'pretraining')
  for lacks, architecture, groups in (
      (('next_sentence',), 'BertForMaskedLM', ['encoder', 'masked_lm']),
      (('next_sentence', 'masked_lm'), 'BertModel', ['encoder', 'pooler'])):
    params = {name: value for name, value in whole.items() if name not in lacks}
    make(tmp_path / architecture, params=params)
    said = export.export(tmp_path / architecture, 'hf', tmp_path / f'{architecture}_hf')
    assert architecture in said
    assert ('left out: pooler' in said) == (architecture == 'BertForMaskedLM')
    imported = import_checkpoint.load(f'hf:{tmp_path / architecture}_hf')
    assert parameters.groups_of(imported.params) == groups


def test_a_runs_best_model_is_exported_unless_a_step_is_asked_for(tmp_path):
  make(tmp_path / 'run', 'classification')
  best = make(tmp_path / 'run' / 'best', 'classification', dataclasses.replace(CONFIG))
  best['classifier']['bias'] += 1
  make(tmp_path / 'run' / 'best', 'classification', params=best)
  said = export.export(tmp_path / 'run', 'hf', tmp_path / 'hf')
  assert 'the best of' in said
  assert_same(import_checkpoint.load(f'hf:{tmp_path / "hf"}').params, best)
  assert 'the best' not in export.export(tmp_path / 'run', 'hf', tmp_path / 'hf5', step=5)


def test_encoder_only_leaves_the_head_out(tmp_path):
  params = models.random_params(CONFIG, 'classification')
  make(tmp_path / 'run', 'classification',
       params={**params, 'layer_weights': np.zeros(4, np.float32)})
  with pytest.raises(ConversionError, match='layer_weights.*--encoder_only'):
    export.export(tmp_path / 'run', 'hf', tmp_path / 'hf')
  assert 'BertModel' in export.export(tmp_path / 'run', 'hf', tmp_path / 'hf', encoder_only=True)


# --- Types -----------------------------------------------------------------------------------


def test_b124_asked_types_are_honoured_and_said(tmp_path, capsys):
  folder = exported(tmp_path)
  for asked in ('float32', 'bfloat16'):
    assert import_checkpoint.main(['--from', f'hf:{folder}', '--output', str(tmp_path / asked),
                                   '--dtype', asked]) == 0
    assert f'parameters of {asked}' in capsys.readouterr().out
    leaves = parameters.flatten(checkpoint.restore_params(tmp_path / asked)).values()
    assert {leaf.dtype.name for leaf in leaves} == {asked}


def test_b124_bfloat16_out_and_in_again_is_bit_for_bit(tmp_path):
  folder = exported(tmp_path, dtype='bfloat16')
  assert json.loads((folder / 'config.json').read_text())['torch_dtype'] == 'bfloat16'
  low = import_checkpoint.load(f'hf:{folder}', dtype='bfloat16')
  import_checkpoint.save(low, tmp_path / 'low')
  export.export(tmp_path / 'low', 'hf', tmp_path / 'again', dtype='bfloat16')
  assert ((tmp_path / 'again' / 'model.safetensors').read_bytes()
          == (folder / 'model.safetensors').read_bytes())
  masters = parameters.flatten(import_checkpoint.load(f'hf:{folder}').params)
  for name, array in parameters.flatten(low.params).items():
    assert masters[name].dtype == np.float32  # unless asked
    np.testing.assert_array_equal(masters[name].astype(ml_dtypes.bfloat16), array)


# --- What Hugging Face directories may hold --------------------------------------------------


def loaded(folder, **options):
  return import_checkpoint.load(f'hf:{folder}', **options)


def test_facts_of_a_head_that_was_trained_anew_elsewhere_are_forgotten(tmp_path):
  """Others keep the keys of config.json that they do not know, whatever becomes of the head."""
  head = {'task': 'x', 'config': dataclasses.asdict(heads.HeadConfig('classification', 3))}
  make(tmp_path / 'run', 'classification', head=head)
  export.export(tmp_path / 'run', 'hf', tmp_path / 'hf')
  assert loaded(tmp_path / 'hf').metadata['head']['task'] == 'x'
  rewrite(tmp_path / 'hf', lambda tensors, config: config.update(
      architectures=['BertForTokenClassification']))
  assert loaded(tmp_path / 'hf').metadata['head'] == {
      'kind': 'tagging', 'labels': LABELS['classification']}


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
  folder = exported(tmp_path)
  (tmp_path / 'small.txt').write_bytes(models.vocabulary(12))
  with pytest.raises(ConversionError, match='140 rows, and the vocabulary 12 entries.*--vocab'):
    loaded(folder, vocab=tmp_path / 'small.txt', lowercase=True)


def test_sharded_weights_are_one_model(tmp_path):
  folder = exported(tmp_path)
  whole = loaded(folder)
  tensors = safetensors_file.read(epath.Path(folder) / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  mapping = {name: f'model-{i % 2}.safetensors' for i, name in enumerate(tensors)}
  for part in set(mapping.values()):
    safetensors_file.write(epath.Path(folder) / part,
                           {name: tensors[name] for name in tensors if mapping[name] == part})
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': mapping}))
  assert_same(loaded(folder).params, whole.params)
  (folder / 'model-1.safetensors').rename(folder / 'model-2.safetensors')
  with pytest.raises(ConversionError, match=r'model-1.*lists it'):
    loaded(folder)
  index.write_text(json.dumps({'weight_map': mapping | {'more': 'model-0.safetensors'}}))
  (folder / 'model-2.safetensors').rename(folder / 'model-1.safetensors')
  with pytest.raises(ConversionError, match='more .model-0.*not in the file'):
    loaded(folder)
  index.write_text(json.dumps({'weight_map': {'w': '../../outside.safetensors'}}))
  with pytest.raises(ConversionError, match='files beside it'):
    loaded(folder)


def test_names_without_prefix_and_legacy_norms(tmp_path):
  folder = exported(tmp_path, kind='encoder')
  whole = loaded(folder)

  def older(tensors, config):
    for name in list(tensors):
      new = name.removeprefix('bert.').replace('LayerNorm.weight', 'LayerNorm.gamma')
      tensors[new.replace('LayerNorm.bias', 'LayerNorm.beta')] = tensors.pop(name)
    tensors['embeddings.position_ids'] = np.arange(48)[None]
    del config['model_type'], config['position_embedding_type']

  rewrite(folder, older)
  again = loaded(folder)
  assert_same(again.params, whole.params)
  assert 'position_ids' in again.report


@pytest.mark.parametrize('stored', ['bias', 'decoder.bias', 'both'])
def test_b120_the_output_bias_by_either_name(tmp_path, stored):
  folder = exported(tmp_path)
  whole = loaded(folder)

  def rename(tensors, config):
    bias = tensors.pop('cls.predictions.bias')
    for name in ('bias', 'decoder.bias') if stored == 'both' else (stored,):
      tensors[f'cls.predictions.{name}'] = bias

  rewrite(folder, rename)
  again = loaded(folder)
  assert_same(again.params, whole.params)
  assert again.metadata['missing'] == []


@pytest.mark.parametrize('name, other', [
    ('cls.predictions.decoder.bias', 'cls.predictions.bias'),
    ('cls.predictions.decoder.weight', 'bert.embeddings.word_embeddings.weight')])
def test_b118_b120_copies_that_differ_are_refused(tmp_path, name, other):
  folder = exported(tmp_path)
  rewrite(folder, lambda tensors, config: tensors.update({name: tensors[other]}))
  assert 'equal copies' in loaded(folder).report
  whole = loaded(folder, head='encoder')
  rewrite(folder, lambda tensors, config: tensors.update({name: tensors[other] + 1}))
  for head in ('auto', 'pretraining'):
    with pytest.raises(ConversionError, match=f'{name} differs from another copy of {other}.*'
                       '--head encoder'):
      loaded(folder, head=head)
  encoder = loaded(folder, head='encoder')  # has no use for the decoder, whatever is in it
  assert_same(encoder.params, whole.params)
  assert name in encoder.report.split('unused')[1]


def test_b118_the_word_table_may_be_stored_as_the_decoder_only(tmp_path):
  folder = exported(tmp_path)
  whole = loaded(folder)
  rewrite(folder, lambda tensors, config: tensors.update({
      'cls.predictions.decoder.weight': tensors.pop('bert.embeddings.word_embeddings.weight')}))
  assert_same(loaded(folder).params, whole.params)


def test_a_head_can_be_left_and_an_absent_one_is_named_as_new(tmp_path):
  folder = exported(tmp_path)
  encoder = loaded(folder, head='encoder')
  assert encoder.metadata['missing'] == ['masked_lm', 'next_sentence']
  assert 'unused   7: cls.predictions.bias' in encoder.report
  bare = exported(tmp_path / 'bare', kind='encoder')
  asked = loaded(bare, head='pretraining')
  assert asked.metadata['head']['kind'] == 'pretraining'
  assert 'new      masked_lm, next_sentence' in asked.report
  assert set(asked.params) == {'bert'}
  with pytest.raises(ConversionError, match='classifier.weight, classifier.bias: not in the check'):
    loaded(bare, head='classification')


def test_labels_and_kind_of_a_plain_classifier(tmp_path):
  folder = exported(tmp_path, kind='classification')
  rewrite(folder, lambda tensors, config: [config.pop(name) for name in (
      'id2label', 'label2id', 'problem_type')])
  assert loaded(folder).metadata['head'] == {
      'kind': 'classification', 'labels': ['LABEL_0', 'LABEL_1', 'LABEL_2']}
  named = loaded(folder, labels=['a', 'b', 'c'], head='multi_label').metadata['head']
  assert named == {'kind': 'multi_label', 'labels': ['a', 'b', 'c']}
  with pytest.raises(ConversionError, match='3 outputs'):
    loaded(folder, labels=['a', 'b'])
  rewrite(folder, lambda tensors, config: config.update(id2label={'0': 'a', '1': 'b'}))
  with pytest.raises(ConversionError, match='id2label.*3 outputs.*--labels.*--head encoder'):
    loaded(folder)
  assert loaded(folder, labels=['a', 'b', 'c']).metadata['head']['labels'] == ['a', 'b', 'c']
  assert set(loaded(folder, head='encoder').params) == {'bert'}


def test_a_regression_of_several_numbers_is_refused(tmp_path):
  folder = exported(tmp_path, kind='classification')
  rewrite(folder, put(problem_type='regression'))
  with pytest.raises(ConversionError, match='regression with 3 outputs.*--head encoder'):
    loaded(folder)
  assert loaded(folder, head='encoder').metadata['head']['kind'] == 'encoder'


def test_rows_of_added_tokens_are_kept_and_go_out_again(tmp_path):
  """Transformers lists them beside vocab.txt, and their rows come last in the word table."""
  folder = exported(tmp_path)
  (folder / 'added_tokens.json').write_text('{"<e2>": 141, "covid": 140}')
  with pytest.raises(ConversionError, match='140 rows.*142 entries.*covid, <e2>.*--vocab'):
    loaded(folder)

  def more_rows(tensors, config):
    config['vocab_size'] = 142
    for name in (TABLE, 'cls.predictions.bias'):
      tensors[name] = np.concatenate([tensors[name], tensors[name][:2] + 1])

  rewrite(folder, more_rows)
  before = safetensors_file.read(epath.Path(folder) / 'model.safetensors')
  imported = loaded(folder)
  assert 'added    2 tokens' in imported.report and 'dropped' not in imported.report
  assert imported.metadata['config']['model']['vocab_size'] == 142
  import_checkpoint.save(imported, tmp_path / 'ckpt')
  export.export(tmp_path / 'ckpt', 'hf', tmp_path / 'again')
  after = safetensors_file.read(epath.Path(tmp_path) / 'again' / 'model.safetensors')
  assert_same(after, before)
  vocabulary = (tmp_path / 'again' / 'vocab.txt').read_bytes()
  assert vocabulary == models.vocabulary(140) + b'covid\n<e2>\n'
  without = loaded(folder, vocab=folder / 'vocab.txt')
  assert 'dropped  the last 2 of 142 rows' in without.report


# --- Errors: said in words, and nothing is left behind -----------------------------------------


def drop(name):
  return lambda tensors, config: tensors.pop(name)


def put(**values):
  return lambda tensors, config: config.update(values)


def reshape(name, shape):
  return lambda tensors, config: tensors.update({name: np.zeros(shape, np.float32)})


VALUE = 'bert.encoder.layer.1.attention.self.value.weight'
TABLE = 'bert.embeddings.word_embeddings.weight'
WRONG = [
    (drop(VALUE), rf'{VALUE}: not in the checkpoint'),
    (drop('bert.embeddings.LayerNorm.bias'), 'bert.embeddings.LayerNorm.bias: not in'),
    (drop('cls.predictions.transform.dense.bias'), 'transform.dense.bias: not in'),  # half a head
    (drop('bert.pooler.dense.bias'), 'bert.pooler.dense.bias: not in'),
    (reshape(VALUE, (32, 31)), rf'{VALUE} has shape \[32, 31\].*ask for \[32, 32\]'),
    (reshape(TABLE, (139, 32)), r'shape \[139, 32\].*ask for \[140, 32\]'),
    (reshape('cls.predictions.bias', (1, 140)), r'shape \[1, 140\]'),
    (reshape('bert.encoder.layer.3.output.dense.bias', 32), 'layer.3.* no place for'),
    (reshape('bert.encoder.layer.0.attention.self.distance_embedding.weight', (9, 8)), 'distance'),
    (lambda tensors, config: tensors.update({TABLE: np.zeros((140, 32), np.int64)}), 'int64'),
    (put(hidden_act='mish'), "hidden_act 'mish'"), (put(hidden_act=None), 'hidden_act None'),
    (put(model_type='roberta'), "model_type is 'roberta'.*BERT"),
    (put(position_embedding_type='relative_key'), 'relative_key.*absolute'),
    (put(is_decoder=True), 'is_decoder'), (put(num_hidden_layers=2), 'layer.2.* no place for'),
    (put(num_hidden_layers=4), 'layer.3.*not in the checkpoint'),
    (put(hidden_size='32'), "hidden_size is '32'"), (put(hidden_size=32.5), 'hidden_size is 32.5'),
    (put(num_attention_heads=5), 'not divisible'), (put(vocab_size=0), 'vocab_size is 0'),
    (lambda tensors, config: config.pop('hidden_size'), 'has no hidden_size'),
]


@pytest.mark.parametrize('change, said', WRONG)
def test_b122_an_import_that_cannot_be_whole_stops_by_name(tmp_path, capsys, change, said):
  folder = exported(tmp_path)
  rewrite(folder, change)
  with pytest.raises(ConversionError, match=said):
    loaded(folder)
  code = import_checkpoint.main(['--from', f'hf:{folder}', '--output', str(tmp_path / 'ckpt')])
  assert code == 2 and not (tmp_path / 'ckpt').exists()
  error = capsys.readouterr().err
  assert error.startswith('import_checkpoint: ') and 'Traceback' not in error


@pytest.mark.parametrize('origin, said', [
    ('hf:{}/nowhere', 'no such folder'), ('hf:{}/empty', 'config.json: no such file'),
    ('tf:{}/nowhere', 'no nowhere.index'), ('tf:{}/empty', r'no \*.index'),
    ('pt:{}', 'hf:DIR or tf:'), ('{}', 'hf:DIR or tf:'), ('hf:', 'hf:DIR or tf:')])
def test_places_that_hold_nothing(tmp_path, origin, said):
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ConversionError, match=said):
    import_checkpoint.load(origin.format(tmp_path))


@pytest.mark.parametrize('content, said', [
    (b'{"a": ', 'not JSON'), (b'[]', 'holds list'), (b'\xff\xfe', 'not JSON')])
def test_a_config_that_cannot_be_read(tmp_path, content, said):
  folder = exported(tmp_path)
  (folder / 'config.json').write_bytes(content)
  with pytest.raises(ConversionError, match=f'config.json: {said}'):
    loaded(folder)


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path):
  folder = exported(tmp_path)
  for name in ('config.json', 'tokenizer_config.json'):
    (folder / name).write_bytes(b'\xef\xbb\xbf' + (folder / name).read_bytes())
  assert_same(loaded(folder).params, checkpoint.restore_params(tmp_path / 'run'))


def test_no_weights_or_cut_weights(tmp_path):
  folder = exported(tmp_path)
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(ConversionError, match='model.safetensors: cut off in cls.seq_relationship'):
    loaded(folder)
  file.rename(folder / 'tf_model.h5')
  with pytest.raises(ConversionError, match='none of model.safetensors.*tf_model.h5 is not read'):
    loaded(folder)


def test_an_output_that_holds_something_is_left_alone(tmp_path):
  folder = exported(tmp_path)
  before = {path: path.read_bytes() for path in folder.iterdir()}
  with pytest.raises(ConversionError, match='exists already'):
    export.export(tmp_path / 'run', 'hf', folder)
  assert {path: path.read_bytes() for path in folder.iterdir()} == before
  with pytest.raises(ConversionError, match='holds checkpoints already'):
    import_checkpoint.save(loaded(folder), tmp_path / 'run')
  assert checkpoint.read_metadata(tmp_path / 'run')['step'] == 5


def test_an_export_that_fails_leaves_nothing(tmp_path, capsys, monkeypatch):
  make(tmp_path / 'run')
  def fail(*args):
    raise OSError(28, 'No space left on device')
  monkeypatch.setattr(safetensors_file, 'write', fail)
  code = export.main(['--checkpoint', str(tmp_path / 'run'), '--to', 'hf',
                      '--output', str(tmp_path / 'hf')])
  assert code == 2 and 'No space left' in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_an_export_of_nothing(tmp_path, capsys):
  code = export.main(['--checkpoint', str(tmp_path), '--to', 'hf', '--output', str(tmp_path / 'o')])
  assert code == 2 and 'no checkpoint' in capsys.readouterr().err


# --- Google's format -------------------------------------------------------------------------


def test_exact_gelu_goes_to_google_only_if_accepted(tmp_path):
  make(tmp_path / 'run')
  with pytest.raises(ConversionError, match='--accept_gelu_mismatch'):
    export.export(tmp_path / 'run', 'tf', tmp_path / 'tf')
  assert not (tmp_path / 'tf').exists()
  said = export.export(tmp_path / 'run', 'tf', tmp_path / 'tf', accept_gelu_mismatch=True)
  assert 'tanh form' in said
  imported = import_checkpoint.load(f'tf:{tmp_path / "tf"}')
  assert imported.metadata['config']['model']['hidden_act'] == 'gelu_tanh'
  exact = import_checkpoint.load(f'tf:{tmp_path / "tf"}', hidden_act='gelu')
  assert exact.metadata['config']['model']['hidden_act'] == 'gelu'
  assert_same(exact.params, imported.params)


@pytest.mark.parametrize('change, said', [
    ({'layer_norm_eps': 1e-6}, '1e-12'), ({'hidden_act': 'silu'}, "'silu' does not exist there")])
def test_what_googles_code_cannot_compute_is_not_exported(tmp_path, change, said):
  make(tmp_path / 'run', config=dataclasses.replace(TANH, **change))
  with pytest.raises(ConversionError, match=said):
    export.export(tmp_path / 'run', 'tf', tmp_path / 'tf')
  with pytest.raises(ConversionError, match='float32 only'):
    export.export(tmp_path / 'run', 'tf', tmp_path / 'tf', dtype='bfloat16')


def test_google_names_and_shapes(tmp_path):
  folder = exported(tmp_path, 'tf', 'classification', TANH)
  tensors, _ = google_tf._read_variables(epath.Path(folder) / google_tf.PREFIX)
  params = checkpoint.restore_params(tmp_path / 'run')
  kernel = params['bert']['encoder']['layers']['intermediate']['kernel']
  np.testing.assert_array_equal(tensors['bert/encoder/layer_2/intermediate/dense/kernel'],
                                kernel[2])
  np.testing.assert_array_equal(tensors['output_weights'], params['classifier']['kernel'].T)
  assert tensors['bert/embeddings/word_embeddings'].shape == (140, 32)
  values = json.loads((folder / 'bert_config.json').read_text())
  assert values['hidden_act'] == 'gelu' and 'layer_norm_eps' not in values


@pytest.mark.parametrize('kind, where', [('classification', ''), ('span', 'cls/squad/')])
def test_b116_fine_tuned_google_checkpoints_without_our_mark(tmp_path, kind, where):
  folder = exported(tmp_path, 'tf', kind, TANH)
  values = json.loads((folder / 'bert_config.json').read_text())
  del values['bertjax']
  (folder / 'bert_config.json').write_text(json.dumps(values))
  imported = import_checkpoint.load(f'tf:{folder}/bert_model.ckpt')
  assert imported.metadata['head']['kind'] == kind
  assert 'absent   masked_lm, next_sentence' in imported.report.replace('pooler, ', '')
  assert_same(imported.params, checkpoint.restore_params(tmp_path / 'run'))


def test_b122_a_damaged_google_checkpoint_is_an_error_in_words(tmp_path):
  folder = exported(tmp_path, 'tf', config=TANH)
  data = folder / 'bert_model.ckpt.data-00000-of-00001'
  content = data.read_bytes()
  for damaged in (content[:len(content) // 2], b'', content[:999] + b'\xff' * 9 + content[1008:]):
    data.write_bytes(damaged)
    with pytest.raises(ConversionError, match='bert_model.ckpt: cannot be read'):
      import_checkpoint.load(f'tf:{folder}')
  data.unlink()
  with pytest.raises(ConversionError, match='cannot be read'):
    import_checkpoint.load(f'tf:{folder}')
  (folder / 'bert_model.ckpt.index').write_bytes(b'nothing of the kind')
  with pytest.raises(ConversionError, match='cannot be read'):
    import_checkpoint.load(f'tf:{folder}')


def test_a_checkpoint_of_tensorflow_2_objects_is_refused(tmp_path):
  import tensorflow as tf
  folder = exported(tmp_path, 'tf', config=TANH)
  for path in folder.glob('bert_model*'):
    path.unlink()
  tf.train.Checkpoint(weight=tf.Variable(1.0)).write(str(folder / 'bert_model.ckpt'))
  with pytest.raises(ConversionError, match='objects of a TensorFlow 2 program'):
    google_tf.read(folder)


def test_several_google_checkpoints_must_be_told_apart(tmp_path):
  folder = exported(tmp_path, 'tf', config=TANH)
  for ending in ('index', 'data-00000-of-00001'):
    content = (folder / f'bert_model.ckpt.{ending}').read_bytes()
    (folder / f'model.ckpt-7.{ending}').write_bytes(content)
  assert google_tf._prefix(epath.Path(folder)).name == 'bert_model.ckpt'
  assert google_tf._prefix(epath.Path(folder / 'model.ckpt-7.index')).name == 'model.ckpt-7'
  for path in folder.glob('bert_model*'):
    path.rename(folder / path.name.replace('bert_model.ckpt', 'model.ckpt-9'))
  with pytest.raises(ConversionError, match='model.ckpt-7, model.ckpt-9'):
    google_tf.read(folder)
