package client

import "github.com/kvd-io/kvd/storage/layout"

// ShardOf is the number of the shard, from 1, that a key belongs to: for tools that
// look at shards one by one. It is fixed for the cluster's life.
func (c *Client) ShardOf(key []byte) uint32 {
	info := c.info.Load()
	return layout.HashKey(info.seed, key).Shard(info.shards)
}
