"""The Alembic plugin: operations for what autogenerate cannot see of our tables, and who asks for them.

Tables, columns, indexes, checks, comments and storage parameters are stock autogenerate's.
"""
