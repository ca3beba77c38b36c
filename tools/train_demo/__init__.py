"""Training of the bundled demo model: data, target, drafter, export. See README.md beside this
file.
"""
