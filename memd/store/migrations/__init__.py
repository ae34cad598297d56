"""Changes of the schema, one file each, in the order that `memd.store.schema.REVISIONS` lists."""
