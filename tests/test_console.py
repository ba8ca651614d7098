"""What the command-line tools write on standard error."""

import subprocess
import sys


def test_messages_are_plain_lines_and_warnings_are_marked():
  code = (
      'from absl import logging; from bertjax.data import console; console.log_plainly()\n'
      "logging.info('%d documents', 3); logging.warning('few'); logging.debug('unseen')\n"
      "console.log_plainly(logging.ERROR); logging.warning('unseen')\n"
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                        encoding='utf-8')
  assert (done.stdout, done.stderr) == ('', '3 documents\nwarning: few\n')
