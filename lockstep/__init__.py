"""Where two trainings part: updates from equal states, and layers from equal inputs."""
