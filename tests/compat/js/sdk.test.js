// The unmodified JavaScript SDK against a running node, configured by its usual environment variables only.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { CommandExitError, NotFoundError, Sandbox } from 'e2b'

let sandbox

before(async () => {
  for (const name of ['E2B_API_KEY', 'E2B_API_URL', 'E2B_SANDBOX_URL']) {
    assert.ok(process.env[name], `${name} is not set: source .aenv/env first`)
  }
  sandbox = await Sandbox.create({ timeoutMs: 300_000, metadata: { suite: 'js' }, envs: { FROM_CREATE: 'seen' } })
})

after(async () => {
  await sandbox?.kill()
})

test('a new sandbox answers and describes itself', async () => {
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.metadata.suite, 'js')
  assert.equal(info.state, 'running')
})

test('commands give output, exit code and environment', async () => {
  const result = await sandbox.commands.run('echo out; echo err >&2; echo $FROM_CREATE $OWN', { envs: { OWN: 'too' } })
  assert.equal(result.exitCode, 0)
  assert.equal(result.stdout, 'out\nseen too\n')
  assert.equal(result.stderr, 'err\n')
})

test('a failing command throws with its exit code', async () => {
  await assert.rejects(sandbox.commands.run('exit 5'), (error) => error instanceof CommandExitError && error.exitCode === 5)
})

test('users and working directories', async () => {
  assert.equal((await sandbox.commands.run('whoami; pwd')).stdout, 'user\n/home/user\n')
  assert.equal((await sandbox.commands.run('whoami; pwd', { user: 'root', cwd: '/tmp' })).stdout, 'root\n/tmp\n')
})

test('stdin, background, list, kill', async () => {
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(cat.pid, 'hello')
  await sandbox.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'hello')
  const sleeping = await sandbox.commands.run('sleep 300', { background: true })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === sleeping.pid))
  assert.equal(await sandbox.commands.kill(sleeping.pid), true)
  await assert.rejects(sleeping.wait(), CommandExitError)
  assert.equal(await sandbox.commands.kill(sleeping.pid), false)
})

test('a command can be connected to again', async () => {
  const first = await sandbox.commands.run('sleep 1.5; echo late', { background: true })
  await first.disconnect()
  const again = await sandbox.commands.connect(first.pid)
  assert.equal((await again.wait()).stdout, 'late\n')
})

test('files', async () => {
  await sandbox.files.write('dir/file.txt', 'content ü')
  assert.equal(await sandbox.files.read('dir/file.txt'), 'content ü')
  assert.equal(await sandbox.files.exists('dir/file.txt'), true)
  assert.equal((await sandbox.files.getInfo('dir/file.txt')).size, 10)
  assert.deepEqual((await sandbox.files.list('dir')).map((entry) => entry.path), ['/home/user/dir/file.txt'])
  await sandbox.files.rename('dir/file.txt', 'dir/other.txt')
  assert.equal(await sandbox.files.exists('dir/file.txt'), false)
  assert.equal(await sandbox.files.makeDir('fresh'), true)
  assert.equal(await sandbox.files.makeDir('fresh'), false)
  await sandbox.files.remove('dir')
  await assert.rejects(sandbox.files.read('dir/other.txt'), NotFoundError)
  const bytes = new Uint8Array(3_000_000).map((_, index) => index % 251)
  await sandbox.files.write('/tmp/bytes', new Blob([bytes]).stream())
  assert.deepEqual(Buffer.from(await sandbox.files.read('/tmp/bytes', { format: 'bytes' })), Buffer.from(bytes))
  await sandbox.files.write('empty', '')
  assert.equal(await sandbox.files.read('empty'), '')
})

test('connect, list, timeout', async () => {
  const same = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await same.commands.run('echo same')).stdout, 'same\n')
  const paginator = Sandbox.list({ query: { metadata: { suite: 'js' } } })
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  assert.ok(found.some((info) => info.sandboxId === sandbox.sandboxId))
  await sandbox.setTimeout(400_000)
  assert.ok((await sandbox.getInfo()).endAt.getTime() - Date.now() > 350_000)
})

test('kill answers true once; afterwards nothing is there', async () => {
  const short = await Sandbox.create({ timeoutMs: 60_000 })
  assert.equal(await short.kill(), true)
  assert.equal(await Sandbox.kill(short.sandboxId), false)
  assert.equal(await short.isRunning(), false)
})

const bootId = async (sandbox) => (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout.trim()

const listed = async (state) => {
  const paginator = Sandbox.list({ query: { metadata: { suite: 'js' }, state: [state] } })
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()).map((info) => info.sandboxId))
  return found
}

const untilPaused = async (sandbox) => {
  const end = Date.now() + 60_000
  while ((await sandbox.getInfo()).state !== 'paused') {
    assert.ok(Date.now() < end, 'it is not paused')
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
}

// Calls `use` with a new sandbox, and removes it in whatever state that left it.
const withSandbox = async (options, use) => {
  const own = await Sandbox.create({ timeoutMs: 120_000, metadata: { suite: 'js' }, ...options })
  try {
    await use(own)
  } finally {
    await own.kill()
  }
}

test('a paused sandbox is listed, and goes on when it is connected to', async () => {
  await withSandbox({}, async (own) => {
    const before = await bootId(own)
    const sleeping = await own.commands.run('sleep 300', { background: true })
    await own.files.write('kept', 'kept')
    assert.equal(await own.pause(), true)
    assert.equal(await own.pause(), false)
    assert.equal(await own.isRunning(), false)
    await assert.rejects(sleeping.wait())
    assert.ok((await listed('paused')).includes(own.sandboxId))
    assert.ok(!(await listed('running')).includes(own.sandboxId))
    const same = await Sandbox.connect(own.sandboxId, { timeoutMs: 120_000 })
    assert.equal(same.sandboxId, own.sandboxId)
    assert.equal(await same.files.read('kept'), 'kept')
    assert.equal(await bootId(own), before)
    assert.ok((await own.commands.list()).some((process) => process.pid === sleeping.pid))
    assert.ok((await listed('running')).includes(own.sandboxId))
    assert.equal(await own.betaPause(), true)
    await own.connect({ timeoutMs: 120_000 })
    assert.equal((await own.commands.run('cat kept')).stdout, 'kept')
  })
})

test('without its memory, or when that is asked for, a paused sandbox boots', async () => {
  await withSandbox({}, async (own) => {
    const boots = [await bootId(own)]
    await own.files.write('kept', 'kept')
    await own.pause({ keepMemory: false })
    await own.connect({ timeoutMs: 120_000 })
    boots.push(await bootId(own))
    await own.pause()
    await own.connect({ timeoutMs: 120_000, onResume: 'reboot' })
    boots.push(await bootId(own))
    assert.equal(new Set(boots).size, 3)
    assert.equal(await own.files.read('kept'), 'kept')
  })
})

test('the end of its time pauses it, and traffic wakes it', async () => {
  await withSandbox({ lifecycle: { onTimeout: 'pause', autoResume: true } }, async (own) => {
    assert.deepEqual((await own.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
    const before = await bootId(own)
    await own.commands.run('echo unflushed > last')
    await own.setTimeout(1_000)
    await untilPaused(own)
    assert.equal((await own.commands.run('cat last')).stdout, 'unflushed\n')
    assert.equal(await bootId(own), before)
    assert.equal((await own.getInfo()).state, 'running')
  })
})

test('a paused sandbox can be killed', async () => {
  await withSandbox({}, async (own) => {
    await own.pause()
    assert.equal(await own.kill(), true)
    assert.equal(await own.kill(), false)
    await assert.rejects(own.pause(), NotFoundError)
    await assert.rejects(Sandbox.connect(own.sandboxId), NotFoundError)
  })
})

test('sandboxes start from a snapshot, which can be listed and deleted', async () => {
  await withSandbox({}, async (own) => {
    await own.files.write('state', 'before')
    // The kernel makes it up when it is read first.
    const before = await bootId(own)
    const snapshot = await own.createSnapshot()
    await own.files.write('state', 'after')
    const child = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 120_000 })
    try {
      assert.equal(await child.files.read('state'), 'before')
      assert.deepEqual([await bootId(child), await bootId(own)], [before, before])
      const listed = await Sandbox.listSnapshots({ sandboxId: own.sandboxId }).nextItems()
      assert.deepEqual(listed.map((item) => item.snapshotId), [snapshot.snapshotId])
    } finally {
      await child.kill()
    }
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  })
})

test('forks go on from where their parent was', async () => {
  await withSandbox({}, async (own) => {
    await own.files.write('state', 'before')
    const forks = await own.fork({ count: 2, timeoutMs: 120_000 })
    try {
      assert.equal(new Set([own.sandboxId, ...forks.map((fork) => fork.sandboxId)]).size, 3)
      for (const fork of forks) {
        assert.equal(await fork.files.read('state'), 'before')
      }
      await forks[0].files.write('state', 'changed')
      assert.equal(await forks[1].files.read('state'), 'before')
      assert.equal(await own.files.read('state'), 'before')
    } finally {
      await Promise.all(forks.map((fork) => fork.kill()))
    }
  })
})
