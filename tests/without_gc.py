"""Imported first by the process that ranks are forked from: what it loads is no garbage. A rank collects again."""

import gc

gc.disable()
