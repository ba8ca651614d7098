"""Tags of words from CoNLL columns, such as named entities.

  python -m bertjax.finetune.tagging --config=configs/finetune/tagging.py \
      --config.init_from=ckpt/ --config.data.train=train.conll --config.data.dev=dev.conll \
      --workdir=runs/ner

Source: paper, section 5.3. Expect of BERT-base (cased) on CoNLL-2003's dev: entity F1 96.4. The
feature-based use: `--config.optimizer.freeze=encoder --config.head.layers=weighted_sum` and a
higher rate.
"""

from ml_collections import ConfigDict

from configs.finetune import common


def get_config() -> ConfigDict:
  """The recipe."""
  config = common.get_config()
  config.optimizer.learning_rate = 5e-5
  config.data = ConfigDict({
      'train': '',
      'dev': '',
      'test': '',
      'scheme': 'auto',
      'token_column': 0,
      'tag_column': -1,
      'test_has_tags': True,
      'stride': 0,
  })
  return config
