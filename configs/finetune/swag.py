"""SWAG or HellaSwag: which of four endings.

  python -m bertjax.finetune.swag --config=configs/finetune/swag.py --config.init_from=ckpt/ \
      --config.data.train=train.csv --config.data.dev=val.csv --workdir=runs/swag

Source: paper, section 4.4: 3 epochs of 16, 2e-5. Expect of BERT-base on SWAG's dev: 80 to 81.6.
"""

from ml_collections import ConfigDict

from configs.finetune import common


def get_config() -> ConfigDict:
  """The recipe."""
  config = common.get_config()
  config.batch_size = 16
  config.data = ConfigDict({'train': '', 'dev': '', 'test': ''})
  return config
