"""GLUE, or one's own texts with labels.

  python -m bertjax.finetune.glue --config=configs/finetune/glue.py:task=rte \
      --config.init_from=ckpt/ --config.data.path=glue_data/ --workdir=runs/rte

  python -m bertjax.finetune.glue --config=configs/finetune/glue.py:task=custom \
      --config.init_from=ckpt/ --config.data.train=train.tsv --config.data.dev=dev.tsv \
      --config.data.text_a=review --config.data.label=stars --workdir=runs/reviews

Source: paper, section 4.1: 3 epochs of 32, the best of 2e-5, 3e-5, 4e-5 and 5e-5 on dev. Expect of
BERT-base on dev: MNLI 84, QNLI 91, SST-2 93, CoLA 57 to 60, RTE 66 to 69 (reference runs).
"""

from ml_collections import ConfigDict

from configs.finetune import common


def get_config(text: str = '') -> ConfigDict:
  """The recipe for task=NAME."""
  config = common.get_config()
  config.data = ConfigDict({
      'task': common.argument(text, 'task', 'rte'),
      'path': '',  # the folder of the official files, or tfds:glue/rte
      'train': '',  # or single files
      'dev': '',
      'test': '',
      'kind': 'classification',  # of task=custom, as what follows
      'text_a': 'text',
      'text_b': '',
      'label': 'label',
      'index': '',
      'separator': ',',
      'labels': (),
      'max_train_rows': 0,
      'strict': False,
  })
  return config
