"""The hardware corpus: Triton launches recorded once on an H200, replayed on the CPU by the PTX emulator.

``data/`` holds one file a launch: the PTX that Triton compiled there, the launch parameters, every byte of the
memory that the kernel could reach before and after the launch, and the versions, the card and the date.
``data/manifest.json`` has the sha256 of each file, and ``bounds.toml`` how closely each replay must agree.

* ``launches`` lists the cases; ``kernels`` and ``kernels_dot`` have the small kernels among them. They need Triton.
* ``record`` makes the files on a GPU: ``python -m mla_conformance.suites.corpus.record --out DIRECTORY``.
* ``stored`` is the file format; ``compare`` counts bit-equal elements and steps.
* ``replay`` runs the files: ``python -m mla_conformance.suites.corpus.replay`` prints the table of all launches.
"""
