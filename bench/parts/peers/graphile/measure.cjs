// One measurement of graphile-worker, in seconds on the standard output: node measure.cjs <what> <count> <how>
// The database is named by PGHOST and so on; the packages are those of the current directory.
"use strict";

const { createRequire } = require("node:module");
const installed = createRequire(process.cwd() + "/");
const { Logger, makeWorkerUtils, run } = installed("graphile-worker");
const { Pool } = installed("pg");

const [what, count, how] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const logger = new Logger(() => () => {});
const now = () => performance.now() / 1000;
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
setTimeout(() => process.exit(1), Number(process.env.PEERS_LIMIT) * 1000).unref();

async function withUtils(work) {
  const pgPool = new Pool({ max: 16 });
  const utils = await makeWorkerUtils({ pgPool, logger });
  try {
    await Promise.all(Array.from({ length: 16 }, () => pgPool.query("SELECT pg_sleep(0.05)"))); // opens all
    return await work(utils, pgPool);
  } finally {
    await utils.release();
    await pgPool.end();
  }
}

const actions = {
  migrate: () => withUtils((utils) => utils.migrate().then(() => 0)),

  many: () =>
    withUtils(async (utils, pgPool) => {
      const start = now();
      for (let at = 0; at < count; at += how) {
        const length = Math.min(how, count - at);
        await utils.addJobs(Array.from({ length }, () => ({ identifier: "noop", payload: {} })));
      }
      const seconds = now() - start;
      await pgPool.query("ANALYZE");
      return seconds;
    }),

  singles: () =>
    withUtils(async (utils) => {
      let left = count;
      const work = async () => {
        while (left-- > 0) await utils.addJob("noop", {});
      };
      const start = now();
      await Promise.all(Array.from({ length: how }, work));
      return now() - start;
    }),

  drain: async () => {
    const pgPool = new Pool({ max: 25 });
    const watch = new Pool({ max: 1 });
    await watch.query("SELECT 1");
    let [called, start] = [0, 0];
    const settings = { concurrentJobs: 24, localQueue: { size: 500 }, completeJobBatchDelay: how, failJobBatchDelay: how };
    let runner;
    const last = new Promise((resolve, reject) => {
      const noop = async () => {
        called += 1;
        if (called === 1) start = now();
        if (called === count) resolve();
      };
      runner = run({ pgPool, logger, noHandleSignals: true, taskList: { noop }, preset: { worker: settings } });
      runner.catch(reject);
    });
    await last;
    const left = "SELECT count(*)::int AS number FROM graphile_worker._private_jobs";
    while ((await watch.query(left)).rows[0].number > 0) await pause(2);
    const seconds = now() - start;
    await (await runner).stop();
    await watch.end();
    await pgPool.end();
    return seconds;
  },
};

actions[what]().then(
  (seconds) => {
    console.log(JSON.stringify(seconds));
    process.exit(0);
  },
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
