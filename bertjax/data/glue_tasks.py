"""The table of the nine GLUE tasks: files, columns, labels, metrics, names of submissions.

Source of the layouts: the files of gluebenchmark.com.
"""

import dataclasses
from collections.abc import Mapping

from etils import epath

from bertjax.data.rows import RowsError


@dataclasses.dataclass(frozen=True)
class Split:
  """One official file.

  Attributes:
    files: its names; the first that exists is read.
    header: its first line; for a file that has none the names of its columns.
    tfds: the name of the split in tensorflow-datasets.
    submission: for a test split, the leaderboard's name of the prediction file.
    num_rows: for a test split, how many lines the leaderboard expects.
    has_header: whether the official file begins with the header.
    tfds_config: where tensorflow-datasets keeps it under another name than the task's.
  """

  files: tuple[str, ...]
  header: str
  tfds: str
  submission: str = ''
  num_rows: int = 0
  has_header: bool = True
  tfds_config: str = ''


@dataclasses.dataclass(frozen=True)
class Task:
  """One task.

  Attributes:
    folder: the name of its folder in glue_data, also the leaderboard's name of it.
    kind: 'classification' or 'regression'.
    texts: the columns of the first and, for pairs, the second text.
    label: the column of the label.
    labels: label names in the order of a model's outputs, as tensorflow-datasets spells them.
    codes: what files and submissions write for them.
    metrics: the official ones, the first of which picks the best checkpoint. CoLA's accuracy is not
      official, but shows a run that has only learnt the majority class.
    splits: by name.
    tfds_texts: the text fields in tensorflow-datasets, where they are not `texts`.
  """

  folder: str
  kind: str
  texts: tuple[str, ...]
  label: str
  labels: tuple[str, ...]
  codes: tuple[str, ...]
  metrics: tuple[str, ...]
  splits: Mapping[str, Split]
  tfds_texts: tuple[str, ...] = ()

  @property
  def num_outputs(self) -> int:
    """Outputs of the head: the classes, or the one number."""
    return 1 if self.kind == 'regression' else len(self.labels)

  @property
  def dev_splits(self) -> tuple[str, ...]:
    """What is evaluated: ('dev',), for MNLI matched and mismatched."""
    return tuple(name for name in self.splits if name.startswith('dev'))

  @property
  def test_splits(self) -> tuple[str, ...]:
    """What every folder has to be predicted: ('test',), for MNLI matched and mismatched.

    GLUE's diagnostic set is a split of MNLI, but not among these: not all have it.
    """
    return tuple(name for name in self.splits if name.startswith('test'))


_PAIR = 'index\tsentence1\tsentence2'
_MRPC = '#1 ID\t#2 ID\t#1 String\t#2 String'
_STSB = 'index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2'
_MNLI = (
    'index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t'
    'sentence1_parse\tsentence2_parse\tsentence1\tsentence2'
)
_MNLI_DEV = _MNLI + '\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label'
_01 = ('0', '1')
_ENTAILMENT = ('entailment', 'not_entailment')
_NLI = ('contradiction', 'entailment', 'neutral')

TASKS: Mapping[str, Task] = {
    'cola': Task(
        'CoLA', 'classification', ('sentence',), 'label', ('unacceptable', 'acceptable'), _01,
        ('matthews', 'accuracy'),
        {
            'train': Split(
                ('train.tsv',), 'source\tlabel\tstar\tsentence', 'train', has_header=False),
            'dev': Split(
                ('dev.tsv',), 'source\tlabel\tstar\tsentence', 'validation', has_header=False),
            'test': Split(('test.tsv',), 'index\tsentence', 'test', 'CoLA.tsv', 1063),
        },
    ),
    'sst2': Task(
        'SST-2', 'classification', ('sentence',), 'label', ('negative', 'positive'), _01,
        ('accuracy',),
        {
            'train': Split(('train.tsv',), 'sentence\tlabel', 'train'),
            'dev': Split(('dev.tsv',), 'sentence\tlabel', 'validation'),
            'test': Split(('test.tsv',), 'index\tsentence', 'test', 'SST-2.tsv', 1821),
        },
    ),
    # Microsoft's own files have the same columns; their test file is GLUE's, with its labels.
    'mrpc': Task(
        'MRPC', 'classification', ('#1 String', '#2 String'), 'Quality',
        ('not_equivalent', 'equivalent'), _01, ('accuracy', 'f1'),
        {
            'train': Split(
                ('train.tsv', 'msr_paraphrase_train.txt'), f'Quality\t{_MRPC}', 'train'),
            'dev': Split(('dev.tsv',), f'Quality\t{_MRPC}', 'validation'),
            'test': Split(
                ('test.tsv', 'msr_paraphrase_test.txt'), f'index\t{_MRPC}', 'test', 'MRPC.tsv',
                1725),
        },
        tfds_texts=('sentence1', 'sentence2'),
    ),
    'stsb': Task(
        'STS-B', 'regression', ('sentence1', 'sentence2'), 'score', (), (),
        ('pearson', 'spearman'),
        {
            'train': Split(('train.tsv',), f'{_STSB}\tscore', 'train'),
            'dev': Split(('dev.tsv',), f'{_STSB}\tscore', 'validation'),
            'test': Split(('test.tsv',), _STSB, 'test', 'STS-B.tsv', 1379),
        },
    ),
    'qqp': Task(
        'QQP', 'classification', ('question1', 'question2'), 'is_duplicate',
        ('not_duplicate', 'duplicate'), _01, ('accuracy', 'f1'),
        {
            'train': Split(
                ('train.tsv',), 'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate', 'train'),
            'dev': Split(
                ('dev.tsv',), 'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate', 'validation'),
            'test': Split(
                ('test.tsv',), 'id\tquestion1\tquestion2', 'test', 'QQP.tsv', 390965),
        },
    ),
    'mnli': Task(
        'MNLI', 'classification', ('sentence1', 'sentence2'), 'gold_label', _NLI, _NLI,
        ('accuracy',),
        {
            'train': Split(('train.tsv',), f'{_MNLI}\tlabel1\tgold_label', 'train'),
            'dev_matched': Split(('dev_matched.tsv',), _MNLI_DEV, 'validation_matched'),
            'dev_mismatched': Split(('dev_mismatched.tsv',), _MNLI_DEV, 'validation_mismatched'),
            'test_matched': Split(
                ('test_matched.tsv',), _MNLI, 'test_matched', 'MNLI-m.tsv', 9796),
            'test_mismatched': Split(
                ('test_mismatched.tsv',), _MNLI, 'test_mismatched', 'MNLI-mm.tsv', 9847),
            # GLUE's diagnostic set, which the MNLI model answers. download_glue_data.py makes
            # diagnostic/diagnostic.tsv of what the server calls AX.tsv.
            'diagnostic': Split(
                ('diagnostic.tsv', 'AX.tsv', '../diagnostic/diagnostic.tsv',
                 '../diagnostic/AX.tsv', '../AX/AX.tsv'),
                _PAIR, 'test', 'AX.tsv', 1104, tfds_config='ax'),
        },
        tfds_texts=('premise', 'hypothesis'),
    ),
    'qnli': Task(
        'QNLI', 'classification', ('question', 'sentence'), 'label', _ENTAILMENT, _ENTAILMENT,
        ('accuracy',),
        {
            'train': Split(('train.tsv',), 'index\tquestion\tsentence\tlabel', 'train'),
            'dev': Split(('dev.tsv',), 'index\tquestion\tsentence\tlabel', 'validation'),
            'test': Split(('test.tsv',), 'index\tquestion\tsentence', 'test', 'QNLI.tsv', 5463),
        },
    ),
    'rte': Task(
        'RTE', 'classification', ('sentence1', 'sentence2'), 'label', _ENTAILMENT, _ENTAILMENT,
        ('accuracy',),
        {
            'train': Split(('train.tsv',), f'{_PAIR}\tlabel', 'train'),
            'dev': Split(('dev.tsv',), f'{_PAIR}\tlabel', 'validation'),
            'test': Split(('test.tsv',), _PAIR, 'test', 'RTE.tsv', 3000),
        },
    ),
    'wnli': Task(
        'WNLI', 'classification', ('sentence1', 'sentence2'), 'label',
        ('not_entailment', 'entailment'), _01, ('accuracy',),
        {
            'train': Split(('train.tsv',), f'{_PAIR}\tlabel', 'train'),
            'dev': Split(('dev.tsv',), f'{_PAIR}\tlabel', 'validation'),
            'test': Split(('test.tsv',), _PAIR, 'test', 'WNLI.tsv', 146),
        },
    ),
}


def plain(name: str) -> str:
  """'SST-2', 'sst_2' and 'sst2' are one."""
  return name.lower().replace('-', '').replace('_', '')


def find_task(name: str) -> Task:
  """The task of this name, however it is spelled ('sst2', 'SST-2').

  Raises:
    RowsError: there is none.
  """
  if plain(name) not in TASKS:
    raise RowsError(f'GLUE has no task {name!r}; there are {", ".join(TASKS)}')
  return TASKS[plain(name)]


def find_split(task: str, file: epath.PathLike) -> str | None:
  """The split for the leaderboard whose official name a file has; None for a name of one's own.

  Predictions of MNLI's test_mismatched.tsv so get the name MNLI-mm.tsv, and so do those of a file
  of that name.

  Raises:
    RowsError: there is no such task.
  """
  here = epath.Path(file).name.lower()
  for name, split in find_task(task).splits.items():
    official = (name.rpartition('/')[2].lower() for name in (*split.files, split.submission))
    if split.submission and here in official:
      return name
  return None
