"""A job as decisions see it: values of what its ranks, agents and end are."""
