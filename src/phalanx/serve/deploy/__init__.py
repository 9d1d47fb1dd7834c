"""Files that run a server or a gateway elsewhere: a container, compose, Kubernetes, systemd."""

from phalanx.serve.deploy.deployment import (
    TARGETS as TARGETS,
    DeploymentPlan as DeploymentPlan,
    render_deployment as render_deployment,
)
