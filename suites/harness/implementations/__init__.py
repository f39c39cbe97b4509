"""The adapters that come with the suite: one module a name, each with a class ``Adapter``."""
