"""SQuAD v1.1 or v2.0.

  python -m bertjax.finetune.squad --config=configs/finetune/squad.py:version=2 \
      --config.init_from=ckpt/ --config.data.train=train-v2.0.json \
      --config.data.dev=dev-v2.0.json --workdir=runs/squad2

Source: paper, sections 4.2 and 4.3: 5e-5; 3 epochs of 32 for v1.1, 2 epochs of 48 for v2.0. Expect
of BERT-base on dev: F1 88.5 (v1.1), 76 to 77 (v2.0).
"""

from ml_collections import ConfigDict

from configs.finetune import common


def get_config(text: str = '') -> ConfigDict:
  """The recipe for version=1 or version=2."""
  config = common.get_config()
  version = int(common.argument(text, 'version', '1'))
  config.num_epochs = 3 if version == 1 else 2
  config.batch_size = 32 if version == 1 else 48
  config.seq_length = 384
  config.optimizer.learning_rate = 5e-5
  config.data = ConfigDict({
      'version': version,
      'train': '',
      'dev': '',
      'test': '',
      'doc_stride': 128,
      'max_query_length': 64,
      'n_best_size': 20,
      'max_answer_length': 30,
      'max_train_questions': 0,
      'strict': False,
  })
  return config
