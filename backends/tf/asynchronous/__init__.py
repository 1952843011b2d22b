"""ParameterServerStrategy."""
