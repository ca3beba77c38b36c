"""Expert routing and expert MLPs."""
