"""``phalanx roles``: who may do what in a project, and the second person of an act that needs two."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.access_gate import require_approvals
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line
from phalanx.cli.governance.policy import Key

roles_app = typer.Typer(no_args_is_help=True, help="Give people roles in a project, and approve what needs two people.")

Home = Annotated[Path | None, typer.Option("--home", metavar="DIR", help="Directory of the project; default: here.")]


@roles_app.command(epilog="Example: phalanx roles key\n\nExample: phalanx roles key --key tpm:device:/dev/tpmrm0")
def key(key: Key = None) -> Answer:
    """Print the fingerprint of your key, for the file of roles; a key file that is missing is made."""
    from phalanx.policy import default_reference, open_person_signer

    with open_person_signer(key or default_reference()) as holder:
        print_line(holder.fingerprint)
        return Answer({"key": holder.fingerprint})


@roles_app.command(
    epilog="Example: phalanx roles sign roles.toml\n\nExample: phalanx roles sign roles.toml --home runs/first"
)
def sign(
    roles: Annotated[Path, typer.Argument(metavar="ROLES.toml", help="People, their keys and roles.")],
    home: Home = None,
    key: Key = None,
) -> Answer:
    """Put people and roles in force for a directory and all below it; a change of earlier roles needs two people."""
    from phalanx.governance.acts import name_target
    from phalanx.policy import HeadMemory, default_reference, open_person_signer, sign_roles

    place, memory = (home or Path()).resolve(), HeadMemory()
    # by the roles in force; where there are none yet, nobody is asked
    require_approvals("policy_change", lambda: name_target("policy_change", roles), place)
    with open_person_signer(key or default_reference()) as holder:
        project, head = sign_roles(roles, place, holder, memory.read_head(place))
    memory.keep_head(place, head)
    print_line(f"{place}: {len(project.roles.people)} people of {project.roles.name}, signed by {holder.fingerprint}")
    return Answer({"home": place, "digest": project.roles.digest, "signer": holder.fingerprint})


@roles_app.command(epilog="Example: phalanx roles show runs/first")
def show(place: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of the project.")] = Path()) -> Answer:
    """List the people of the projects that govern a directory, with their roles."""
    from phalanx.policy import Project, find_projects

    projects = [Project.open(home) for home in find_projects((place,))]
    for project in projects:
        for name, person in project.roles.people.items():
            print_line(f"{project.roles.name}: {name}: {', '.join(person.roles)} ({len(person.keys)} keys)")
    if not projects:
        print_line(f"{place}: no roles govern it; one person may do everything")
    return Answer({"projects": {str(project.home): project.roles.model_dump(mode="json") for project in projects}})


@roles_app.command(
    epilog="Example: phalanx roles approve release runs/first --key keys/bob.key\n\n"
    "Example: phalanx roles approve decryption datasets/patients\n\n"
    "Example: phalanx roles approve policy_change roles.toml"
)
def approve(
    action: Annotated[str, typer.Argument(metavar="ACT", help="release, key_rotation, decryption or policy_change.")],
    target: Annotated[Path, typer.Argument(metavar="PLACE", help="What it is done to, or the target of a refusal.")],
    home: Home = None,
    key: Key = None,
) -> Answer:
    """Approve an act of another person; your approval is good for this target alone, until the roles change."""
    from phalanx.errors import ConfigError
    from phalanx.governance.acts import name_target
    from phalanx.policy import FOUR_EYES, HeadMemory, Project, default_reference, find_projects, open_person_signer

    act = next((name for name in FOUR_EYES if name == action), None)
    if act is None:
        raise ConfigError(f"{action}: expected {', '.join(FOUR_EYES)}")
    homes = find_projects((home or target,)) or find_projects((Path(),))
    if not homes:
        raise ConfigError(f"{target}: no roles govern it; name the project with --home")
    name, memory, people = name_target(act, target), HeadMemory(), []
    with open_person_signer(key or default_reference()) as holder:
        for place in homes:
            person, head = Project.open(place).approve_act(act, name, holder, memory.read_head(place))
            memory.keep_head(place, head)
            people.append(person)
    print_line(f"{act} of {name} approved by {', '.join(people)}")
    return Answer({"action": act, "target": name, "people": people, "homes": homes})
