# Alembic's settings; all there are: https://alembic.sqlalchemy.org/en/latest/tutorial.html

[alembic]
# where env.py and versions/ are, relative to this file
script_location = ${script_location}

# put on sys.path, so that env.py finds your package
prepend_sys_path = .
path_separator = os

# The database, where DATABASE_URL is not set. A password has no place in a file under version control.
# sqlalchemy.url = postgresql://localhost/app

# put the date before the name of a new migration
# file_template = %%(year)d_%%(month).2d_%%(day).2d_%%(hour).2d%%(minute).2d-%%(rev)s_%%(slug)s

[post_write_hooks]
# format new migrations
# hooks = ruff
# ruff.type = module
# ruff.module = ruff
# ruff.options = format REVISION_SCRIPT_FILENAME

[loggers]
keys = root,sqlalchemy,alembic

[handlers]
keys = console

[formatters]
keys = generic

[logger_root]
level = WARNING
handlers = console
qualname =

[logger_sqlalchemy]
level = WARNING
handlers =
qualname = sqlalchemy.engine

[logger_alembic]
level = INFO
handlers =
qualname = alembic

[handler_console]
class = StreamHandler
args = (sys.stderr,)
level = NOTSET
formatter = generic

[formatter_generic]
format = %(levelname)-5.5s [%(name)s] %(message)s
datefmt = %H:%M:%S
