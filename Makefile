# SPDX-License-Identifier: Apache-2.0

VENV := .venv
PYTHON := $(VENV)/bin/python
LAB := $(PYTHON) -W ignore -m lab
READY := $(VENV)/.ready
NOVA_READY := $(VENV)/.nova-ready
TEMPEST_READY := $(VENV)/.tempest-ready
STACK_READY := $(VENV)/.stack-ready
CARGO := cargo
RUST_VERSION := 1.85
WORKSPACES := hydrator lab/disk lab/guest lab/ptrace
# Tests in the lab that "make test" has time for; "make soak" has all.
SHORT := [.]ChainTest.test_on_to|test_h1_|test_h8
SHORT := $(SHORT)|test_h25_of_two|LiveMigrationTest.test_lost|[.]RunningGuestTest
SHORT := $(SHORT)|ThinLioMoveTest.test_there_and_back|restart_of_both
SHORT := $(SHORT)|ThinLioSourcePowerCut|dies_with|test_boot
SHORT := $(SHORT)|[.]SecurityTest.test_nobody_else|[.]SecurityTest.test_secret
SHORT := $(SHORT)|ThinLioSecurityTest.test_source|ThinCopyTest.test_clone_of
SHORT := $(SHORT)|while_it_runs

.PHONY: help setup demo demo-nova test unit-test rust-test rust helper \
        lab-test chaos-test volume-test lab-programs ptrace soak soak-walks \
        soak-kills soak-kernel soak-nvme soak-lab soak-exchanged soak-nova \
        soak-devstack qemu-test tempest bench lab-kernel nova nova-test \
        bench-nova bench-attach bench-distance bench-guest-io bench-fleet \
        tempest-nova lab-up lab-down clean

help:
	@echo 'make demo      a volume follows its instance: the main job, on the lab'
	@echo 'make demo-nova servers of Nova, and their volumes go where they go'
	@echo 'make test      every test: unit, style, types, docs, lab'
	@echo 'make lab-up    a cloud to try things by hand ($(LAB) --help)'
	@echo 'make lab-down  end it, with all that it started'
	@echo 'make unit-test, make rust-test, make chaos-test, make nova-test,'
	@echo '               make volume-test   its parts (the last three: make lab-test)'
	@echo 'make soak      all that "make test" has no time for, most of a day;'
	@echo '               soak-walks, soak-kills, soak-kernel, soak-lab,'
	@echo '               soak-nvme, soak-exchanged, soak-nova,'
	@echo '               soak-devstack   parts of it'
	@echo 'make qemu-test a guest of QEMU on a disk of the native helper'
	@echo 'make tempest   Cinder'\''s own suites, beside Cinder'\''s own driver;'
	@echo '               tempest-nova   those of instances'
	@echo 'make bench     what a move costs a guest, in figures (BENCH=--quick)'
	@echo 'make bench-attach  how long an attachment takes, beside Cinder'\''s driver'
	@echo 'make bench-distance  what arrives of a source that is far'
	@echo 'make bench-guest-io  what a guest gets by each of QEMU'\''s ways to do I/O'
	@echo 'make bench-fleet  what a hundred nodes ask of what they share'
	@echo 'make bench-nova  what instances wait for, beside Cinder'\''s own driver'
	@echo 'make lab-kernel   the lab'\''s own kernel, with ublk (minutes, once)'
	@echo 'make nova      what instances in the lab need: libvirt and QEMU'

setup: $(READY)

# What is missing of a profile of bindep.txt
INSTALL = missing=$$($(VENV)/bin/bindep -b $(1)); test -z "$$missing" || \
	    (apt-get update && DEBIAN_FRONTEND=noninteractive \
	     apt-get install -y --no-install-recommends $$missing)

# Installs what is missing of Debian's packages, and a virtual environment
# with the pinned OpenStack.
$(READY): bindep.txt constraints.txt requirements.txt test-requirements.txt \
          lab/requirements.txt setup.cfg
	python3 -c 'import ensurepip' || \
	    (apt-get update && apt-get install -y python3-venv)
	python3 -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet bindep uv
	$(call INSTALL,lab)
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) \
	    -c constraints.txt -r requirements.txt -r test-requirements.txt \
	    -r lab/requirements.txt
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) tox tox-uv
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --no-deps -e .
	$(PYTHON) -W ignore -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	touch $@

demo: setup helper ptrace
	$(PYTHON) -W ignore -m lab.demo

demo-nova: nova
	$(PYTHON) -W ignore -m lab.demo_nova

# Without optimization across crates, which takes longer than the tests gain:
# one build serves them all.
test rust-test: export CARGO_PROFILE_RELEASE_LTO = off
# What waits leaves its time to what works: downloads to the unit tests, and labs,
# which have theirs before others, to Rust's compiler.
test: setup
	$(MAKE) --jobs=2 unit-test nova
	$(MAKE) --jobs=2 rust-test volume-test chaos-test nova-test

unit-test: setup
	@test -n "$$LOCALSTOR_DEVSTACK" || echo "SKIPPED: the tests of the" \
	    "DevStack plugin. LOCALSTOR_DEVSTACK does not say where DevStack" \
	    "is." >&2
	$(VENV)/bin/tox run-parallel --parallel-no-spinner --skip-env 'py3|nova|database'
	$(VENV)/bin/tox run --fail-fast -e py3,nova,database \
	    || { $(WHAT_FAILED); exit 1; }

# What "make test" has no time for.  Each part stands alone, because all of them
# take most of a day.
soak: qemu-test soak-walks soak-kills soak-kernel soak-nvme soak-lab \
      soak-exchanged soak-nova soak-devstack tempest

# New ones each time; what fails says how to repeat it.  The helper's are by fixed
# seeds, and take an hour or so.
soak-walks: setup rust
	LOCALSTOR_SOAK_WALKS=2000 LOCALSTOR_SOAK_PAIRS=500 \
	    LOCALSTOR_SOAK_ORDERS=300 LOCALSTOR_SOAK_FAULTS=1 \
	    $(VENV)/bin/stestr run \
	    'test_walk|test_pairs|moves.test_inter|test_arriving|test_copier|test_reverts|FaultTest'
	LOCALSTOR_SOAK_TRANSACTIONS=1 $(VENV)/bin/tox run -e database
	cd hydrator && LOCALSTOR_WALKS=400000 $(CARGO) test --locked --release \
	    -p localstor-hydrator-simulation --test walks

# Helpers of both kinds
soak-kills: setup lab-programs lab-kernel
	LOCALSTOR_KILLS=200 $(RUN_LAB_TESTS) 'was_answered'; $(LAB_DOWN)

# Where helpers have ublk devices
soak-kernel: setup lab-programs lab-kernel
	LOCALSTOR_KERNEL=own $(RUN_LAB_TESTS) 'test_moves|test_chains'; $(LAB_DOWN)

# Where sources are read over NVMe/TCP
soak-nvme: setup lab-programs lab-kernel
	LOCALSTOR_KERNEL=own LOCALSTOR_TRANSPORT=nvme-tcp $(RUN_LAB_TESTS) \
	    'test_(nvme|moves|chains|security|hazards|power|block|unpriv|contained|ipv6)' \
	    ; $(LAB_DOWN)

# The tests in the lab that "make test" leaves out
soak-lab: setup lab-programs lab-kernel
	$(RUN_LAB_TESTS) --exclude-regex '$(SHORT)|test_(chaos|nova|stack)'; $(LAB_DOWN)

# All of them with the two data paths exchanged, but for what has a helper of its
# own or none; and with dozens of moves at once: a thin pool has room for so many
# where helpers leave holes.
soak-exchanged: setup lab-programs lab-kernel
	LOCALSTOR_DATA_PATHS=clone,hydrator LOCALSTOR_VERIFY=full \
	    LOCALSTOR_MANY=50 LOCALSTOR_MEMORY=3G \
	    $(RUN_LAB_TESTS) --exclude-regex \
	    'test_(nova|stack|devstack|hydrator|dmsetup|lvm|nvme)'; $(LAB_DOWN)

soak-nova: TEST_LABS := nova
soak-nova: nova
	$(RUN_LAB_TESTS) 'test_nova'; $(LAB_DOWN)

# DevStack's own scripts, where LOCALSTOR_DEVSTACK says
soak-devstack: TEST_LABS := stack
soak-devstack: setup helper lab-programs $(STACK_READY)
	$(RUN_LAB_TESTS) 'test_stack'; $(LAB_DOWN)

# Two to three minutes, without KVM.  Debian's kernel is downloaded, not installed.
qemu-test: setup rust
	$(call INSTALL,qemu)
	cd hydrator && $(CARGO) build --locked --release
	TEST_PATH=tests/qemu $(VENV)/bin/stestr run --serial --color

# The suites are Tempest's and its plugin's, unchanged, and our plugin's;
# TEMPEST=--help tells of less than all of them.
tempest: setup helper ptrace $(TEMPEST_READY)
	$(LAB) --name tempest tempest $(TEMPEST)

# Tempest's suites of instances
tempest-nova: nova $(TEMPEST_READY)
	$(LAB) --name tempest tempest --nova $(TEMPEST)

$(TEMPEST_READY): $(READY) lab/tempest-requirements.txt \
                  tempest-plugin/pyproject.toml
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) \
	    -c constraints.txt -r lab/tempest-requirements.txt \
	    -e ./tempest-plugin
	touch $@

# What the lab runs first: cargo does one thing at a time.
rust-test: lab-programs
	for workspace in $(WORKSPACES); do \
	    (cd $$workspace && $(call LINT,fmt,--all --check) && \
	     $(call LINT,clippy,--locked --release --workspace --all-targets -- -D warnings) \
	     && $(CARGO) test --locked --workspace --release) || exit 1; \
	done

# Not every Rust comes with these two.
LINT = if $(CARGO) $(1) --version > /dev/null 2>&1; then $(CARGO) $(1) $(2); \
	else echo "SKIPPED in $$workspace: there is no cargo $(1)" >&2; fi

# What the lab runs of our own that is not Python
lab-programs: setup rust helper ptrace
	for workspace in lab/disk lab/guest; do \
	    (cd $$workspace && $(CARGO) build --locked --release) || exit 1; \
	done

# Without which some machines can't start a node
ptrace: setup rust
	cd lab/ptrace && $(CARGO) build --locked --release

# Installed as on a node, from its wheel
helper: setup rust
	$(VENV)/bin/maturin build --quiet --release --locked --strip \
	    -m hydrator/daemon/Cargo.toml --out hydrator/target/wheels
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --reinstall \
	    hydrator/target/wheels/*.whl

# A Rust that is new enough is left as it is; so is one that is too old and not
# of a package, because it would stand before Debian's in the PATH.
rust: setup
	@$(FOUND_RUST); $(RUST_IS_NEW) || case $$(command -v $(CARGO)) in \
	    ''|/usr/bin/*) $(call INSTALL,rust) ;; \
	esac
	@$(FOUND_RUST); $(RUST_IS_NEW) || { \
	    echo "Rust $(RUST_VERSION) or later is needed, and cargo in the" \
	         "PATH; found is $${found:-none}. See https://rustup.rs" >&2; \
	    exit 1; }

FOUND_RUST = found=$$($(CARGO) --version 2>/dev/null | cut -d' ' -f2)
RUST_IS_NEW = printf '%s\n' $(RUST_VERSION) "$${found:-0}" | sort -V -C

# What went wrong stands at the end, where one looks first: how the last of them
# failed, then the names of all.
WHAT_FAILED := $(VENV)/bin/stestr failing | tail -n 20; \
    $(VENV)/bin/stestr failing --list

# Labs are taken down whatever comes of it: of a target beside which others run,
# its own.
RUN_LAB_TESTS := TEST_PATH=tests/lab $(VENV)/bin/stestr run --serial --color
TEST_LABS := test test-chaos nova furnished blocks unprivileged contained names \
    releases multipathd mirrored ipv6
LAB_DOWN = status=$$?; for name in $(TEST_LABS); do \
    $(LAB) --name $$name down || status=$$?; done; \
    [ $$status = 0 ] || { $(WHAT_FAILED); }; \
    exit $$status

lab-test: chaos-test nova-test volume-test

volume-test: TEST_LABS := test
volume-test: setup lab-programs
	$(RUN_LAB_TESTS) '$(SHORT)'; $(LAB_DOWN)

# In a lab of its own, and it waits more than it works
chaos-test: TEST_LABS := test-chaos
chaos-test: setup lab-programs
	$(RUN_LAB_TESTS) test_chaos; $(LAB_DOWN)

# One instance of Nova's and its volumes: its guest is slow, and keeps one processor
nova-test: TEST_LABS := nova
nova-test: nova
	$(RUN_LAB_TESTS) '[.]InstanceTest'; $(LAB_DOWN)

# No test: it judges nothing.  BENCH=--quick makes it short.  What it runs is
# looked for where cargo puts things by default.  Without QEMU it says so.
bench: setup rust ptrace lab-kernel
	-$(call INSTALL,bench)
	cd hydrator && env -u CARGO_TARGET_DIR sh -c '\
	    $(CARGO) build --locked --release && \
	    $(CARGO) build --locked --release -p localstor-hydrator-frontends \
	        --examples && \
	    $(CARGO) bench --locked -p localstor-hydrator-core --no-run'
	$(LAB) --name bench-node bench $(BENCH)

# No test either: instances beside Cinder's own driver, in turn
bench-nova: nova
	$(LAB) --name bench-nova compare $(COMPARE)

# Nor this: attachments, one by one and many at once
bench-attach: setup lab-programs
	$(LAB) --name bench-node attach $(ATTACH)

# Nor this: sources that are far
bench-distance: setup lab-programs
	$(LAB) --name bench-node distance $(DISTANCE)

# Nor this: what a guest gets by each of QEMU's ways to do I/O, without a lab
bench-guest-io: setup
	$(call INSTALL,qemu)
	$(LAB) guest-io $(GUEST_IO)

# Nor this: hundreds of simulated nodes with real volume services
bench-fleet: setup ptrace
	$(LAB) --name fleet fleet $(FLEET)

# Kept outside the repository, and built again when its recipe changes
lab-kernel: setup
	$(call INSTALL,kernel)
	$(PYTHON) -m lab.kernel

# Instances in the lab's nodes: who needs none of them needs no libvirt.
nova: setup lab-programs $(NOVA_READY)

# After Rust, because there is one apt
$(NOVA_READY): $(READY) lab/nova-requirements.txt | rust
	$(call INSTALL,nova)
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) \
	    -c constraints.txt -r lab/nova-requirements.txt
	touch $@

$(STACK_READY): $(READY) lab/stack-requirements.txt | rust
	$(call INSTALL,stack)
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) \
	    -c constraints.txt -r lab/stack-requirements.txt
	touch $@

lab-up: setup ptrace
	$(LAB) up

# Whatever this checkout has started
lab-down: setup
	for name in default demo demo-nova $(TEST_LABS) boot tempest fleet \
	    bench-node bench-nova hydrator-ublk hydrator-nbd devstack stack; do \
	    $(LAB) --name $$name down; done

clean: lab-down
	rm -rf $(VENV) .lab .tox .stestr .mypy_cache doc/build
	rm -rf $(addsuffix /target,$(WORKSPACES))
