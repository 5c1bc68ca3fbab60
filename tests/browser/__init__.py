"""The dashboard in a real browser, against a real model.

`make test-browser` installs what is missing; `make test` runs these where Chromium is installed.
"""
