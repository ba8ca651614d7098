"""Which of our parameters is which variable of Hugging Face and of Google: one table.

Our layers are stacked on a leading axis, theirs are separate variables. Our kernels are [in, out];
Hugging Face's are [out, in]. Google's are [in, out] too, save the `output_weights` of its heads.
The word table is the output matrix of the masked-LM head (tied): it is stored once here, and copies
that files hold of it must agree with it (B118).

Sources: google-research/bert modeling.py, run_pretraining.py, run_classifier.py, run_squad.py;
Transformers modeling_bert.py.
"""

from collections.abc import Iterable
from typing import NamedTuple

from bertjax.model import BertConfig

HUGGING_FACE, GOOGLE = 'hf', 'tf'


class ConversionError(ValueError):
  """A checkpoint that cannot be imported or exported; the message names the file or variable."""


# What a module holds: our leaf, Hugging Face's, Google's, its axes, and whose array is transposed.
# V vocabulary, D hidden_size, F intermediate_size, T positions, S segments, C outputs of a head;
# I and O stand for a dense layer's two sizes.
_TABLE = (('/embedding', '.weight', '', 'IO', ''),)
_DENSE = (('/kernel', '.weight', '/kernel', 'IO', 'hf'), ('/bias', '.bias', '/bias', 'O', ''))
_NORM = (('/scale', '.weight', '/gamma', 'O', ''), ('/bias', '.bias', '/beta', 'O', ''))
_LOGITS = (('/kernel', '.weight', 'output_weights', 'IO', 'hf tf'),
           ('/bias', '.bias', 'output_bias', 'O', ''))
_BIAS = (('/bias', '.bias', 'output_bias', 'O', ''),)

# Group, kind, sizes, ours, Hugging Face's, Google's. {} is the number of the layer.
_MODULES = (
    ('encoder', _TABLE, 'VD', 'bert/embeddings/word_embeddings',
     'bert.embeddings.word_embeddings', 'bert/embeddings/word_embeddings'),
    ('encoder', _TABLE, 'TD', 'bert/embeddings/position_embeddings',
     'bert.embeddings.position_embeddings', 'bert/embeddings/position_embeddings'),
    ('encoder', _TABLE, 'SD', 'bert/embeddings/token_type_embeddings',
     'bert.embeddings.token_type_embeddings', 'bert/embeddings/token_type_embeddings'),
    ('encoder', _NORM, 'DD', 'bert/embeddings/layer_norm',
     'bert.embeddings.LayerNorm', 'bert/embeddings/LayerNorm'),
    ('encoder', _DENSE, 'DD', 'bert/encoder/layers/attention/query',
     'bert.encoder.layer.{}.attention.self.query', 'bert/encoder/layer_{}/attention/self/query'),
    ('encoder', _DENSE, 'DD', 'bert/encoder/layers/attention/key',
     'bert.encoder.layer.{}.attention.self.key', 'bert/encoder/layer_{}/attention/self/key'),
    ('encoder', _DENSE, 'DD', 'bert/encoder/layers/attention/value',
     'bert.encoder.layer.{}.attention.self.value', 'bert/encoder/layer_{}/attention/self/value'),
    ('encoder', _DENSE, 'DD', 'bert/encoder/layers/attention/output',
     'bert.encoder.layer.{}.attention.output.dense',
     'bert/encoder/layer_{}/attention/output/dense'),
    ('encoder', _NORM, 'DD', 'bert/encoder/layers/attention/layer_norm',
     'bert.encoder.layer.{}.attention.output.LayerNorm',
     'bert/encoder/layer_{}/attention/output/LayerNorm'),
    ('encoder', _DENSE, 'DF', 'bert/encoder/layers/intermediate',
     'bert.encoder.layer.{}.intermediate.dense', 'bert/encoder/layer_{}/intermediate/dense'),
    ('encoder', _DENSE, 'FD', 'bert/encoder/layers/output',
     'bert.encoder.layer.{}.output.dense', 'bert/encoder/layer_{}/output/dense'),
    ('encoder', _NORM, 'DD', 'bert/encoder/layers/output_layer_norm',
     'bert.encoder.layer.{}.output.LayerNorm', 'bert/encoder/layer_{}/output/LayerNorm'),
    ('pooler', _DENSE, 'DD', 'bert/pooler', 'bert.pooler.dense', 'bert/pooler/dense'),
    ('masked_lm', _DENSE, 'DD', 'masked_lm/dense',
     'cls.predictions.transform.dense', 'cls/predictions/transform/dense'),
    ('masked_lm', _NORM, 'DD', 'masked_lm/layer_norm',
     'cls.predictions.transform.LayerNorm', 'cls/predictions/transform/LayerNorm'),
    ('masked_lm', _BIAS, 'DV', 'masked_lm', 'cls.predictions', 'cls/predictions/'),
    ('next_sentence', _LOGITS, 'D2', 'next_sentence', 'cls.seq_relationship',
     'cls/seq_relationship/'),
    ('classifier', _LOGITS, 'DC', 'classifier', 'classifier', ''),
    ('qa_outputs', _LOGITS, 'D2', 'qa_outputs', 'qa_outputs', 'cls/squad/'),
)


class Variable(NamedTuple):
  """One of our parameters, and what it is elsewhere.

  Attributes:
    group: 'encoder', 'pooler', 'masked_lm', 'next_sentence', 'classifier' or 'qa_outputs'.
    ours: its path, as in 'bert/pooler/kernel'.
    hf: Hugging Face's name; {} stands for the number of the layer.
    tf: Google's name, likewise.
    axes: a letter for each axis of our array, without that of the layers.
    transposed: where the array is transposed: 'hf', 'hf tf' or ''.
  """

  group: str
  ours: str
  hf: str
  tf: str
  axes: str
  transposed: str

  @property
  def stacked(self) -> bool:
    return '{}' in self.hf

  def names(self, style: str, num_layers: int) -> list[str]:
    """Its name in a style ('hf' or 'tf'), or those of its layers."""
    pattern = self.hf if style == HUGGING_FACE else self.tf
    return [pattern.format(layer) for layer in range(num_layers)] if self.stacked else [pattern]


VARIABLES = tuple(
    Variable(group, ours + leaf[0], hf + leaf[1], tf + leaf[2],
             leaf[3].replace('I', sizes[0]).replace('O', sizes[1]), leaf[4])
    for group, kind, sizes, ours, hf, tf in _MODULES for leaf in kind)

# Kind of head -> the groups that its model has.
GROUPS = {
    'pretraining': ('encoder', 'pooler', 'masked_lm', 'next_sentence'),
    'encoder': ('encoder', 'pooler'),
    'classification': ('encoder', 'pooler', 'classifier'),
    'regression': ('encoder', 'pooler', 'classifier'),
    'multi_label': ('encoder', 'pooler', 'classifier'),
    'choice': ('encoder', 'pooler', 'classifier'),
    'tagging': ('encoder', 'classifier'),
    'span': ('encoder', 'qa_outputs'),
}
# What a checkpoint of that kind may lack: training initialises it, and the metadata says so.
OPTIONAL = {
    'pretraining': ('pooler', 'masked_lm', 'next_sentence'),
    'encoder': ('pooler',),
}


def of(groups: Iterable[str]) -> list[Variable]:
  """The variables of some groups, in the order of the table."""
  groups = set(groups)
  return [variable for variable in VARIABLES if variable.group in groups]


def sizes(config: BertConfig) -> dict[str, int]:
  """The size that each letter of `Variable.axes` stands for; C is the head's own affair."""
  return {'V': config.vocab_size, 'D': config.hidden_size, 'F': config.intermediate_size,
          'T': config.max_position_embeddings, 'S': config.type_vocab_size, '2': 2}
