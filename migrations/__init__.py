"""The history of the database's shape. Expand first, contract in a later release."""
