# AgentENV: `make up` on a fresh machine ends with a sandbox that answered; `make test` runs everything.
# Each target installs what is missing and hands over to `cargo xtask`.

SHELL := /bin/bash
export PATH := $(PATH):/usr/sbin:/sbin:$(HOME)/.cargo/bin

.DEFAULT_GOAL := help
.PHONY: help up down test check bench doctor clean

# The task runner is built aloud the first time: it takes a minute on a fresh machine.
# run(bootstrap options, task)
define run
	@started=$$(date +%s) && scripts/bootstrap.sh $(1) \
	  && { [ -x $${CARGO_TARGET_DIR:-target}/release/xtask ] || cargo build --release --package xtask; } \
	  && AENV_MAKE_STARTED=$$started cargo xtask $(2)
endef

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: ## build, start the node in the background, run a command in a first sandbox
	$(call run,,up)

down: ## stop the node and every sandbox, unmount, leave nothing running (images and caches stay)
	$(call run,,down)

test: ## everything: checks, unit tests, real guests, the nested rig, the unmodified SDKs (FULL=1: all tests in the rig too)
	$(call run,--tests,test $(if $(FULL),--full))

check: ## format, lints, licences, dependency direction, sizes
	$(call run,,check)

bench: ## time creates against the running node
	$(call run,,bench create)

doctor: ## what this machine offers, what was chosen and why
	$(call run,,doctor)

clean: ## make down, and remove everything made here but the build output
	$(call run,,clean)
