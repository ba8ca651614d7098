"""The table of names: complete for our models, and right by names taken from the references."""

import json

import jax
import pytest

from bertjax import heads, state
from bertjax.convert import names
from bertjax.model import BertConfig

CONFIG = BertConfig(vocab_size=128, hidden_size=12, num_hidden_layers=3, num_attention_heads=2,
                    intermediate_size=20, max_position_embeddings=30, type_vocab_size=4)


def shapes_of(build) -> dict[str, tuple[int, ...]]:
  _, tree = state.split(build)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def in_table(kind: str, outputs: int) -> dict[str, tuple[int, ...]]:
  sizes = names.sizes(CONFIG) | {'C': outputs}
  return {variable.ours: (CONFIG.num_hidden_layers,) * variable.stacked
          + tuple(sizes[axis] for axis in variable.axes)
          for variable in names.of(names.GROUPS[kind])}


def test_the_table_has_every_parameter_of_the_pretraining_model_and_no_other():
  model = shapes_of(lambda rngs: heads.BertForPreTraining(CONFIG, rngs))
  assert in_table('pretraining', 0) == model


@pytest.mark.parametrize('kind, outputs', [
    ('classification', 3), ('regression', 1), ('multi_label', 4), ('choice', 1), ('tagging', 5),
    ('span', 2)])
def test_the_table_has_every_parameter_of_each_head(kind, outputs):
  head = heads.HeadConfig(kind, outputs)
  assert in_table(kind, outputs) == shapes_of(lambda rngs: heads.HEADS[kind](CONFIG, head, rngs))


@pytest.mark.parametrize('style', [names.HUGGING_FACE, names.GOOGLE])
def test_no_name_stands_for_two(style):
  every = [name for variable in names.VARIABLES for name in variable.names(style, 3)]
  assert len(set(every)) == len(every)


def test_names_and_transposes_are_the_references(golden):
  """The map of golden/07_checkpoints was taken from the real graph and the real model."""
  stored = json.loads((golden / '07_checkpoints' / 'name_map_bert_base_uncased.json').read_text(
      encoding='utf-8'))
  ours = {}
  for variable in names.of(names.GROUPS['pretraining']):
    between = ('hf' in variable.transposed) != ('tf' in variable.transposed)
    for hf, tf in zip(variable.names('hf', 12), variable.names('tf', 12), strict=True):
      ours[tf] = (hf, between)
  assert ours == {row['google_tf1']: (row['hf'], row['transpose']) for row in stored}
